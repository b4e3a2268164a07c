"""Files that are written atomically, of this machine or remote (`kdpkit._internal.storage`)."""

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from kdpkit import errors
from kdpkit._internal import checks, storage


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file, which replaces the one at `path` unless the block raises.

    Readers and other writers of `path` see the old file or the new one, never a part. The
    temporary file has the same suffix. Missing directories are created. For a remote `path` it is a
    file of this machine, which is then uploaded.
    """
    target = storage.path(path)
    if isinstance(target, storage.RemotePath):
        with tempfile.TemporaryDirectory() as directory:
            temporary = Path(directory) / target.name
            yield temporary
            target.upload(temporary)
        return
    final = Path(os.path.realpath(target))  # of a link, the target is replaced
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}-{uuid.uuid4().hex}{final.suffix}")
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file of this machine: the one at `path`, or a temporary copy if it is remote."""
    source = storage.path(path)
    if isinstance(source, Path):
        yield source
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / source.name
        source.call("get_file", str(copy))
        yield copy


def make_writable(directory: storage.AnyPath) -> None:
    """Create a directory if it is missing; raise before a long run if no files can be written."""
    trial = directory / ".kdpkit-trial"
    try:
        with replacing(trial) as file:
            file.touch()
        trial.unlink(missing_ok=True)
    except errors.InputError:
        raise
    except OSError as error:
        checks.fail_for_file(
            f"The directory cannot be made and written ({error.strerror})",
            directory,
            remedy="Choose a directory, not a file, where you may write.",
        )
