"""Files that grow on this machine and are kept in object storage."""

import shutil
import tempfile
import warnings
import weakref
from pathlib import Path

from kdpkit._internal import storage


class Mirror:
    """A local directory whose files are copied to object storage when they have grown.

    TensorBoard's own writer appends to its file, which object storage does not know: by gcsfs each
    part then replaces the one before.
    """

    def __init__(self, target: storage.RemotePath) -> None:
        self.local = Path(tempfile.mkdtemp())
        self._target = target
        self._sizes: dict[Path, int] = {}  # when they were last copied
        weakref.finalize(self, shutil.rmtree, self.local, ignore_errors=True)

    def copy(self) -> None:
        """Copy what has grown; what cannot be copied now is warned of, and copied by the next call.

        The local files go with the program, so that what the last call has not copied is lost.
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
