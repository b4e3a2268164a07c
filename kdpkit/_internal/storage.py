"""Paths of this machine and of object storage, under the same few methods.

`path` gives a `pathlib.Path`, or a `RemotePath` for what has a scheme, such as `gs://bucket/file`.
A scheme that TensorFlow knows, if it is installed, is read and written by `tf.io.gfile`, another
by fsspec and the package that it names for it (gcsfs, s3fs, ...). Neither is loaded before a path
with a scheme is used.
"""

import contextlib
import dataclasses
import datetime
import errno
import fnmatch
import importlib.util
import os
import pathlib
import posixpath
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol, TypeAlias

from kdpkit import _checks

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CUT_BY_PATHLIB = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_PERMISSION = {"PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError"}


class RemoteFileError(_checks.FileInputError):
    """A file in object storage cannot be used; `strerror` holds the reason alone."""


class NoRemoteFileError(RemoteFileError, FileNotFoundError):
    """There is no such file, directory or bucket."""


@dataclasses.dataclass(frozen=True, order=True, repr=False)
class RemotePath(os.PathLike[str]):
    """A path with a scheme, with the methods of `pathlib.Path` that kdpkit uses.

    Directories need not be made: they come with the first file in them. Every method but those on
    the name asks the storage, and raises `RemoteFileError`, whose text is one sentence.
    """

    url: str

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __truediv__(self, part: str | os.PathLike[str]) -> "RemotePath":
        root = self.url if self.url.endswith("/") else f"{self.url}/"
        return RemotePath(root + os.fspath(part).strip("/"))

    @property
    def parent(self) -> "RemotePath":
        """The directory, or the path itself where there is none above."""
        scheme, _, rest = self.url.partition("://")
        above, slash, _ = rest.rpartition("/")
        return RemotePath(f"{scheme}://{above}") if slash else self

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.partition("://")[2].rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return pathlib.PurePosixPath(self.name).suffix

    def with_name(self, name: str) -> "RemotePath":
        """Give the path beside this one."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether there is a file or a directory."""
        return self._found() is not None

    def is_dir(self) -> bool:
        """Whether there is a directory."""
        found = self._found()
        return found is not None and found.is_directory

    def is_file(self) -> bool:
        """Whether there is a file."""
        found = self._found()
        return found is not None and not found.is_directory

    def stat(self) -> "_Entry":
        """Give size and time of the last change."""
        with reporting(self.url):
            return _system(self.url).entry(self.url)

    def _found(self) -> "_Entry | None":
        try:
            return self.stat()
        except FileNotFoundError:
            return None

    def iterdir(self) -> "Iterator[RemotePath]":
        """Give what is in the directory."""
        with reporting(self.url):
            names = _system(self.url).names(self.url)
        return (self / name for name in sorted(names))

    def glob(self, pattern: str) -> "Iterator[RemotePath]":
        """Give what is in the directory and matches; nothing if there is no directory."""
        try:
            return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: the directory comes with its first file."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            with reporting(self.url):
                _system(self.url).remove(self.url)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        with reporting(self.url):
            return _system(self.url).read(self.url)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the whole file as text."""
        return self.read_bytes().decode(encoding)

    def download(self, file: pathlib.Path) -> None:
        """Copy the file to this machine."""
        with reporting(self.url):
            _system(self.url).download(self.url, str(file))

    def upload(self, file: pathlib.Path) -> None:
        """Put a file of this machine here, whole or not at all.

        It is written beside its place, under a hidden name, and moved there, since not every
        storage makes a file appear at its end alone. A killed process leaves the hidden one.
        """
        system = _system(self.url)
        beside = self.with_name(f".{self.name}-{uuid.uuid4().hex}{self.suffix}")
        with reporting(self.url):
            try:
                _upload(system, file, beside)
                system.move(beside.url, self.url)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error says why
                    system.remove(beside.url)
                raise

    def try_writing(self) -> None:
        """Write a file in this directory, and remove it."""
        system, trial = _system(self.url), self / f".kdpkit-{uuid.uuid4().hex}"
        with reporting(self.url), tempfile.TemporaryDirectory() as directory:
            empty = pathlib.Path(directory) / "empty"
            empty.touch()
            _upload(system, empty, trial)
            system.remove(trial.url)


def _upload(system: "_System", file: pathlib.Path, place: RemotePath) -> None:
    """Copy a file to the storage, into a directory that may have to be made."""
    try:
        system.upload(str(file), place.url)
    except Exception as error:
        if not _is_missing(error):
            raise
        system.make_directory(place.parent.url)
        system.upload(str(file), place.url)


AnyPath: TypeAlias = pathlib.Path | RemotePath


def path(value: str | os.PathLike[str]) -> AnyPath:
    """Give a path of this machine, or of object storage if it has a scheme.

    Raises:
        ValueError: It is `gs:/...`, which pathlib made of `gs://...`.

    >>> path("logs/run"), path("gs://bucket/logs") / "run"
    (PosixPath('logs/run'), RemotePath('gs://bucket/logs/run'))
    """
    if isinstance(value, RemotePath):
        return value
    text = os.fspath(value)
    if is_remote(text):
        scheme, _, rest = text.partition("://")
        root = "/" if rest.startswith("/") else ""
        return RemotePath(f"{scheme}://{rest.rstrip('/') or root}")
    local = pathlib.Path(text)
    first = local.parts[0] if len(local.parts) > 1 else ""
    if _CUT_BY_PATHLIB.fullmatch(first) and not text.startswith("."):
        _checks.refuse(
            f"A path with a scheme has two slashes, which `pathlib` makes one: {first}//.",
            path=text,
            remedy=f"Give it as text: '{first}//{'/'.join(local.parts[1:])}'; a directory of that "
            f"name here is './{first}'.",
        )
    return local


def is_remote(value: str | os.PathLike[str]) -> bool:
    """Whether a path has a scheme."""
    return bool(_SCHEME.match(os.fspath(value)))


def require_tensorflow(value: str | os.PathLike[str]) -> str:
    """Accept a path that TensorFlow itself reads and writes, as `tf.data` does.

    Raises:
        ValueError: TensorFlow does not know the scheme.
    """
    path(value)  # refuses what pathlib has cut
    text = os.fspath(value)
    scheme = text.partition("://")[0]
    if is_remote(text) and scheme not in _tensorflow_schemes():
        _checks.refuse(
            f"TensorFlow, which reads and writes this path, does not know {scheme}://.",
            path=text,
            remedy=f"It knows {_listed(_tensorflow_schemes())}; `import tensorflow_io` adds some. "
            "Use one of these, or a path of this machine.",
        )
    return text


@contextlib.contextmanager
def reporting(url: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what goes wrong with a path in the block, if it is remote, as one sentence about it."""
    if not is_remote(url):
        yield
        return
    try:
        yield
    except _checks.InputError:
        raise
    # TensorFlow, gcsfs, s3fs and what they stand on have no common kind of error.
    except Exception as error:
        raise _as_sentence(error, os.fspath(url)) from error


def _as_sentence(error: Exception, url: str) -> RemoteFileError:
    kind = RemoteFileError
    if _is_missing(error):
        kind = NoRemoteFileError
        number, reason = errno.ENOENT, os.strerror(errno.ENOENT)
        sentence = f"There is no such file, directory or bucket: {url}. Check the path."
    elif isinstance(error, PermissionError) or type(error).__name__ in _PERMISSION:
        number, reason = errno.EACCES, f"permission denied: {_reason(error)}"
        sentence = (
            f"There is no permission to use {url} ({_reason(error)}). Check the credentials of "
            "this machine and the rights of their account."
        )
    else:
        number, reason = errno.EIO, _reason(error)
        sentence = f"{url} cannot be used ({reason}). Check the path and the network."
    told = kind(sentence)
    told.errno, told.strerror, told.filename = number, reason, url
    return told


def _is_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"


def _reason(error: Exception) -> str:
    """Give the first line of what a library says, without the server's answer."""
    said = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    first = str(said).strip().partition("\n")[0].partition(" with body")[0]
    first = re.sub(r"^\S+://\S+; ", "", first)  # TensorFlow's, of the hidden file perhaps
    return first.rstrip(".") or type(error).__name__


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a storage tells of a file, under the names of `os.stat_result`."""

    is_directory: bool
    st_size: int
    st_mtime_ns: int


class _System(Protocol):
    """What is asked of a storage; paths are whole, with their scheme."""

    def entry(self, url: str) -> _Entry: ...
    def names(self, url: str) -> list[str]: ...
    def read(self, url: str) -> bytes: ...
    def download(self, url: str, file: str) -> None: ...
    def upload(self, file: str, url: str) -> None: ...
    def move(self, url: str, other: str) -> None: ...
    def remove(self, url: str) -> None: ...
    def make_directory(self, url: str) -> None: ...


class _TensorFlow:
    """The file systems of TensorFlow."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._gfile = tf.io.gfile

    def entry(self, url: str) -> _Entry:
        found = self._gfile.stat(url)
        return _Entry(found.is_directory, found.length, found.mtime_nsec)

    def names(self, url: str) -> list[str]:
        return [name.rstrip("/") for name in self._gfile.listdir(url)]

    def read(self, url: str) -> bytes:
        with self._gfile.GFile(url, "rb") as stream:
            return stream.read()

    def download(self, url: str, file: str) -> None:
        self._gfile.copy(url, file, overwrite=True)

    def upload(self, file: str, url: str) -> None:
        self._gfile.copy(file, url, overwrite=True)

    def move(self, url: str, other: str) -> None:
        self._gfile.rename(url, other, overwrite=True)

    def remove(self, url: str) -> None:
        self._gfile.remove(url)

    def make_directory(self, url: str) -> None:
        self._gfile.makedirs(url)


class _Fsspec:
    """A file system of fsspec."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        # Elsewhere paths begin with a bucket. There are no directories, and fsspec would make it.
        self._has_directories = path.startswith("/")

    def entry(self, url: str) -> _Entry:
        found = self._system.info(url)
        return _Entry(found["type"] == "directory", found["size"] or 0, self._changed(url, found))

    def _changed(self, url: str, found: dict[str, Any]) -> int:
        if found["type"] == "directory":
            return 0
        changed: datetime.datetime = self._system.modified(url)
        return int(changed.timestamp() * 1e9)

    def names(self, url: str) -> list[str]:
        directory = self._system.info(url)["name"].rstrip("/")
        found = [name.rstrip("/") for name in self._system.ls(url, detail=False)]
        return [posixpath.basename(name) for name in found if name != directory]

    def read(self, url: str) -> bytes:
        return self._system.cat_file(url)

    def download(self, url: str, file: str) -> None:
        self._system.get_file(url, file)

    def upload(self, file: str, url: str) -> None:
        if set(url) & set("*?[]"):  # fsspec takes them for patterns when it moves a file
            _checks.refuse(
                "Names in object storage must do without *, ?, [ and ].",
                path=url,
                remedy="Choose another name.",
            )
        self._system.put_file(file, url)

    def move(self, url: str, other: str) -> None:
        self._system.mv(url, other)

    def remove(self, url: str) -> None:
        self._system.rm_file(url)

    def make_directory(self, url: str) -> None:
        if self._has_directories:
            self._system.makedirs(url, exist_ok=True)


def _system(url: str) -> _System:
    """Give the file system that knows the scheme."""
    scheme = url.partition("://")[0]
    if scheme in _tensorflow_schemes():
        return _TensorFlow()
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        _refuse_scheme(scheme, url, "fsspec, by which other schemes are read, is not installed")
    try:
        # Other processes write there too, so that nothing may be remembered.
        return _Fsspec(*url_to_fs(url, use_listings_cache=False))
    except (ImportError, ValueError) as error:  # a package is missing, or no one knows the scheme
        _refuse_scheme(scheme, url, _reason(error))


def _refuse_scheme(scheme: str, url: str, reason: str) -> NoReturn:
    _checks.refuse(
        f"Nothing that is installed reads and writes {scheme}:// ({reason}).",
        path=url,
        remedy="For Google's storage run `pip install 'kdpkit[storage]'` (fsspec and gcsfs) or "
        "install TensorFlow, for others fsspec and its package (s3fs for s3://); or check the "
        "spelling.",
    )


def _tensorflow_schemes() -> set[str]:
    """Give the schemes that TensorFlow knows, none where it is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        return set()
    import tensorflow as tf

    return {scheme for scheme in tf.io.gfile.get_registered_schemes() if scheme}


def _listed(schemes: set[str]) -> str:
    return ", ".join(f"{scheme}://" for scheme in sorted(schemes)) or "none"
