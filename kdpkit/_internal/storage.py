"""Paths of this machine and of object storage, and files that are written there atomically.

`path` returns a `pathlib.Path`, or a `RemotePath` for what has a scheme: `gs://bucket/file`, which
fsspec reads and writes, with the package that it names for the scheme (gcsfs, s3fs, ...).
"""

import contextlib
import os
import pathlib
import posixpath
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, Self, TypeAlias

from kdpkit import errors
from kdpkit._internal import checks

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CUT_BY_PATHLIB = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_LOCAL = ("file", "local")  # schemes of fsspec for this machine, whose paths begin with /


class RemotePath(pathlib.PurePosixPath):
    """A path with a scheme, with the methods of `pathlib.Path` that kdpkit uses.

    Directories exist once there is a file in them. Methods that use the storage raise
    `RemoteFileError`, whose text is one sentence.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest if scheme in _LOCAL else rest.removeprefix('/')}"

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of fsspec's file system on this path."""
        with reporting(self):
            return getattr(_system(self), method)(str(self), *arguments)

    def exists(self) -> bool:
        return bool(self.call("exists"))

    def is_dir(self) -> bool:
        return bool(self.call("isdir"))

    def is_file(self) -> bool:
        return bool(self.call("isfile"))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Return what is in the directory and matches; nothing if there is no directory."""
        names = (self / pattern).call("glob")
        return (self / posixpath.basename(name) for name in sorted(names))

    def unlink(self, *, missing_ok: bool = False) -> None:
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self.call("rm_file")

    def read_bytes(self) -> bytes:
        return self.call("cat_file")

    def upload(self, file: pathlib.Path) -> None:
        """Upload a file of this machine, which object storage does atomically."""
        with reporting(self):
            system = _system(self)
            if str(self).partition("://")[0] in _LOCAL:
                system.makedirs(str(self.parent), exist_ok=True)
            system.put_file(str(file), str(self))


AnyPath: TypeAlias = pathlib.Path | RemotePath


def path(value: str | os.PathLike[str]) -> AnyPath:
    """Return a path of this machine, or of object storage if it has a scheme.

    >>> path("logs/run"), path("gs://bucket/logs") / "run"
    (PosixPath('logs/run'), RemotePath('gs://bucket/logs/run'))
    """
    text = os.fspath(value)
    if is_remote(text):
        return RemotePath(text)
    local = pathlib.Path(text)
    if _CUT_BY_PATHLIB.fullmatch(local.parts[0] if len(local.parts) > 1 else ""):
        checks.fail(
            "A path with a scheme has two slashes, of which `pathlib` leaves one.",
            path=text,
            remedy="Pass it as text.",
        )
    return local


def is_remote(value: str | os.PathLike[str]) -> bool:
    return bool(_SCHEME.match(os.fspath(value)))


@contextlib.contextmanager
def reporting(url: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors about a remote path as one sentence."""
    try:
        yield
    except errors.InputError:
        raise
    except Exception as error:  # gcsfs, s3fs and TensorFlow have no common kind of error.
        if not is_remote(url):
            raise
        where, reason = os.fspath(url), _reason(error)
        is_missing = isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"
        kind = errors.NoRemoteFileError if is_missing else errors.RemoteFileError
        reported = kind(
            f"There is no such file, directory or bucket: {where}. Check the path."
            if is_missing
            else f"{where} cannot be used ({reason}). Check the path, the network and the rights "
            "of this machine's account."
        )
        reported.strerror, reported.filename = reason, where
        raise reported from error


def _reason(error: Exception) -> str:
    message = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    return str(message).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _system(path: RemotePath) -> Any:
    try:
        from fsspec.core import url_to_fs

        # Without a cache, because other processes write there too.
        return url_to_fs(str(path), use_listings_cache=False)[0]
    except (ImportError, ValueError) as error:  # no fsspec, not the package it needs, or a typo
        checks.fail(
            f"No installed package reads and writes {str(path).partition('://')[0]}:// "
            f"({_reason(error)}).",
            path=str(path),
            remedy=f"For Google's storage run `{checks.install_command('storage')}` (fsspec and "
            "gcsfs), for others fsspec and its package (s3fs for s3://); or check the spelling.",
        )


@contextlib.contextmanager
def replacing(name: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a temporary file, which replaces the one of this name unless the block raises.

    Its readers and other writers see the old file or the new one, never a part. The temporary file
    has the same suffix. Missing directories are created. For a remote one it is a file of this
    machine, which is then uploaded.
    """
    target = path(name)
    if isinstance(target, RemotePath):
        with tempfile.TemporaryDirectory() as directory:
            temporary = pathlib.Path(directory) / target.name
            yield temporary
            target.upload(temporary)
        return
    final = pathlib.Path(os.path.realpath(target))  # of a link, the target is replaced
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}-{uuid.uuid4().hex}{final.suffix}")
    try:
        yield temporary
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def fetched(name: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a file of this machine: the one of this name, or a temporary copy if it is remote."""
    source = path(name)
    if isinstance(source, pathlib.Path):
        yield source
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / source.name
        source.call("get_file", str(copy))
        yield copy


def make_writable(directory: AnyPath) -> None:
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
