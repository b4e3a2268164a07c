"""Files that are written atomically, and files that one process holds.

They may be in object storage, as `gs://bucket/file`; see `kdpkit._internal.storage`.
"""

import contextlib
import errno
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from kdpkit import errors
from kdpkit._internal import checks, storage

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_held: dict[str, int] = {}  # descriptors of the files that `acquire` has taken
_MARK = f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"  # in remote ones


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, beside `path`, that replaces it when the block ends well.

    Readers and other writers of `path` see the old file or the new one, never a part. The
    temporary file keeps the suffix, and is gone if the block raises. Missing directories are made.
    For a remote `path` it is a file of this machine, which is then put there.

    >>> directory = tempfile.mkdtemp()
    >>> with replacing(f"{directory}/new/notes.txt") as file:
    ...     _ = file.write_text("done")
    >>> Path(directory, "new", "notes.txt").read_text()
    'done'
    """
    target = storage.path(path)
    if isinstance(target, storage.RemotePath):
        with tempfile.TemporaryDirectory() as directory:
            temporary = Path(directory) / target.name
            yield temporary
            target.upload(temporary)
        return
    final = Path(os.path.realpath(target))  # a link stays, its target is replaced
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}-{uuid.uuid4().hex}{final.suffix}")
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_in_first_process(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Do as `replacing` does, in every process; of several the first one's file stays.

    For a model, which all processes save since each may hold parts of it.
    """
    from kdpkit._internal import processes  # which loads Keras

    if processes.index() == 0:
        with replacing(path) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / Path(path).name


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file of this machine: the one at `path`, or a copy for the block if it is remote."""
    source = storage.path(path)
    if isinstance(source, Path):
        yield source
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / source.name
        source.download(copy)
        yield copy


def readable(path: str | os.PathLike[str]) -> storage.AnyPath:
    """Accept a path to a file that exists, is not empty and may be read."""
    file = storage.path(path)
    if file.is_dir():
        checks.fail_for_file("A file is needed, and this is a directory", file)
    try:
        is_empty = _is_empty(file)
    except FileNotFoundError:
        checks.fail_for_file("There is no such file", file, remedy="Check the path.")
    except errors.InputError:
        raise
    except OSError as error:
        checks.fail_for_file(f"The file cannot be read ({error.strerror})", file)
    if is_empty:
        checks.fail_for_file("The file is empty", file)
    return file


def readable_here(path: str | os.PathLike[str]) -> Path:
    """Accept what `readable` does, if it is a file of this machine."""
    file = readable(path)
    if isinstance(file, storage.RemotePath):
        checks.fail_for_file("A file of this machine is needed", file, remedy="Copy it first.")
    return file


def _is_empty(file: storage.AnyPath) -> bool:
    if isinstance(file, storage.RemotePath):
        return file.stat().st_size == 0
    with file.open("rb") as stream:  # a pipe has no size
        return not stream.read(1)


def acquire(path: str | os.PathLike[str]) -> bool:
    """Take a file for this process, unless another process has it.

    It is this process's until `release`, or until the process ends in whatever way, though a
    network's file system may know of a lost machine a minute or two later. It may be taken twice.
    Where locks are unknown everyone gets it, and in object storage, where there are none, whoever
    comes last: `taken_over` is how the others find out.
    """
    target = storage.path(path)
    if isinstance(target, storage.RemotePath):
        with replacing(target) as temporary:
            temporary.write_text(_MARK, encoding="utf-8")
        return True
    name = os.path.realpath(target)
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
    """Let a file go that this process has taken; a remote one keeps its mark, to no harm."""
    if storage.is_remote(path):
        return
    file = _held.pop(os.path.realpath(path), None)
    if file is not None:
        os.close(file)


def taken_over(path: str | os.PathLike[str]) -> str | None:
    """Name the process that took a remote file after this one took it; None if none has."""
    file = storage.path(path)
    if isinstance(file, Path):  # which is locked
        return None
    try:
        mark = file.read_text()
    except FileNotFoundError:
        return None
    return None if mark == _MARK else mark.partition(" ")[2]
