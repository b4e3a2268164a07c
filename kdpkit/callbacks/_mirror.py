"""Growing local files that are copied to object storage."""

import shutil
import tempfile
import warnings
import weakref
from pathlib import Path

from kdpkit._internal import storage


class Mirror:
    """A local directory whose files are uploaded to object storage when they have grown.

    TensorBoard's writer appends to its file, which object storage does not support: with gcsfs each
    part would replace the previous one.
    """

    def __init__(self, target: storage.RemotePath) -> None:
        self.local = Path(tempfile.mkdtemp())
        self._target = target
        self._sizes: dict[Path, int] = {}  # at the last copy
        weakref.finalize(self, shutil.rmtree, self.local, ignore_errors=True)

    def copy(self) -> None:
        """Copy files that have grown; warn about failures, which the next call retries.

        The local files are deleted with the program, so anything not copied by the last call is
        lost.
        """
        for file in sorted(path for path in self.local.rglob("*") if path.is_file()):
            size = file.stat().st_size
            if size == self._sizes.get(file):
                continue
            try:
                (self._target / file.relative_to(self.local).as_posix()).upload(file)
            except OSError as error:
                warnings.warn(
                    f"{error} The end of the next epoch, if there is one, tries again.",
                    stacklevel=2,
                )
                return
            self._sizes[file] = size
