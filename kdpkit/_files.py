"""Files that are whole or not there, and files that one process holds."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_held: dict[str, int] = {}  # descriptors of the files that `acquire` has taken


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, beside `path`, that takes its place when the block ends well.

    Readers and other writers of `path` see the old file or the new one, never a part. The
    temporary file keeps the suffix, and is gone if the block raises. Missing directories are made.
    """
    final = Path(path).resolve()  # a link stays, its target is replaced
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}-{uuid.uuid4().hex}{final.suffix}")
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def acquire(path: str | os.PathLike[str]) -> bool:
    """Take a file for this process, unless another process has it.

    It is this process's until `release`, or until the process ends in whatever way, though a
    network's file system may know of a lost machine a minute or two later. It may be taken twice.
    Where locks are unknown everyone gets it.
    """
    name = os.path.realpath(path)
    if fcntl is None or name in _held:
        return True
    file = os.open(name, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    # Closing it anywhere in this process would free it, hence one for all.
    _held[name] = file
    return True


def release(path: str | os.PathLike[str]) -> None:
    """Let a file go that this process has taken."""
    file = _held.pop(os.path.realpath(path), None)
    if file is not None:
        os.close(file)
