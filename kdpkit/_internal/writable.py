"""Directories that are tried before a run, which may take hours, writes its results there."""

import tempfile

from kdpkit._internal import checks, storage


def make(directory: storage.AnyPath) -> None:
    """Make a directory if need be, and write a file there that is gone again.

    Raises:
        FileInputError: It cannot be made or written.
    """
    if isinstance(directory, storage.RemotePath):
        directory.try_writing()
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        checks.fail_for_file(
            f"The directory cannot be made and written ({error.strerror})",
            directory,
            remedy="Choose a directory, not a file, where you may write.",
        )
