"""Paths of this machine and of object storage, under the same few methods.

`path` returns a `pathlib.Path`, or a `RemotePath` for what has a scheme: `gs://bucket/file`. That
is read and written by fsspec and the package that it names for the scheme (gcsfs, s3fs, ...), which
are loaded when such a path is first used.
"""

import contextlib
import dataclasses
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
from typing import Any, Self, TypeAlias

from kdpkit import errors
from kdpkit._internal import checks

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CUT_BY_PATHLIB = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_PERMISSION = {"PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError"}


@dataclasses.dataclass(frozen=True, order=True, repr=False)
class RemotePath(os.PathLike[str]):
    """A path with a scheme, with the methods of `pathlib.Path` that kdpkit uses.

    Directories need not be made: they come with the first file in them. Every method but those on
    the name asks the storage, and raises `RemoteFileError`, whose text is one sentence.
    """

    url: str

    def __fspath__(self) -> str:
        return self.url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __truediv__(self, part: str | os.PathLike[str]) -> Self:
        return type(self)(f"{self.url.removesuffix('/')}/{os.fspath(part).strip('/')}")

    @property
    def parent(self) -> Self:
        """The directory, or the path itself where there is none above."""
        above, _, name = self.url.rpartition("/")
        return self if above.endswith("/") and name else type(self)(above or self.url)

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.url)

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return pathlib.PurePosixPath(self.name).suffix

    def with_name(self, name: str) -> Self:
        """Return the path beside this one."""
        return self.parent / name

    def ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        """Call a method of fsspec's file system on this path."""
        with reporting(self.url):
            return getattr(_system(self.url), method)(self.url, *arguments, **settings)

    def exists(self) -> bool:
        """Whether there is a file or a directory."""
        return bool(self.ask("exists"))

    def is_dir(self) -> bool:
        """Whether there is a directory."""
        return bool(self.ask("isdir"))

    def is_file(self) -> bool:
        """Whether there is a file."""
        return bool(self.ask("isfile"))

    def iterdir(self) -> Iterator[Self]:
        """Return what is in the directory."""
        itself = self.ask("info")["name"].rstrip("/")
        names = {name.rstrip("/") for name in self.ask("ls", detail=False)} - {itself}
        return (self / name for name in sorted(map(posixpath.basename, names)))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Return what is in the directory and matches; nothing if there is no directory."""
        try:
            return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
        except FileNotFoundError:
            return iter(())

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: the directory comes with its first file."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self.ask("rm_file")

    def read_bytes(self) -> bytes:
        """Read the file."""
        return self.ask("cat_file")

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the file as text."""
        return self.read_bytes().decode(encoding)

    def upload(self, file: pathlib.Path) -> None:
        """Put a file of this machine here, atomically.

        It is written to a hidden name beside the final one, and moved there, since not every
        storage makes a file appear at its end alone. A killed process leaves the hidden one.
        """
        beside = self.with_name(f".{self.name}-{uuid.uuid4().hex}{self.suffix}")
        with reporting(self.url):
            system = _system(self.url)
            try:
                _put(system, file, beside)
                system.mv(beside.url, self.url)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error has the reason
                    system.rm_file(beside.url)
                raise

    def try_writing(self) -> None:
        """Write a file in this directory, and remove it."""
        trial = self / f".kdpkit-{uuid.uuid4().hex}"
        with reporting(self.url), tempfile.NamedTemporaryFile() as empty:
            system = _system(self.url)
            _put(system, pathlib.Path(empty.name), trial)
            system.rm_file(trial.url)


def _put(system: Any, file: pathlib.Path, target: RemotePath) -> None:
    """Copy a file to the storage, into a directory that may have to be made."""
    if set(target.url) & set("*?[]"):  # fsspec takes them for patterns when it moves a file
        checks.fail(
            "Names in object storage must not contain *, ?, [ or ].",
            path=target.url,
            remedy="Choose another name.",
        )
    try:
        system.put_file(str(file), target.url)
    except FileNotFoundError:
        # Elsewhere paths begin with a bucket. There are no directories, and fsspec would make it.
        if system._strip_protocol(target.url).startswith("/"):
            system.makedirs(target.parent.url, exist_ok=True)
        system.put_file(str(file), target.url)


AnyPath: TypeAlias = pathlib.Path | RemotePath


def path(value: str | os.PathLike[str]) -> AnyPath:
    """Return a path of this machine, or of object storage if it has a scheme.

    Raises:
        ValueError: It is `gs:/...`, which pathlib made of `gs://...`.

    >>> path("logs/run"), path("gs://bucket/logs") / "run"
    (PosixPath('logs/run'), RemotePath('gs://bucket/logs/run'))
    """
    text = os.fspath(value)
    if is_remote(text):
        scheme, _, rest = text.partition("://")
        root = "/" if rest.startswith("/") else ""
        return RemotePath(f"{scheme}://{rest.rstrip('/') or root}")
    local = pathlib.Path(text)
    first = local.parts[0] if len(local.parts) > 1 else ""
    if _CUT_BY_PATHLIB.fullmatch(first) and not text.startswith("."):
        checks.fail(
            f"A path with a scheme has two slashes, which `pathlib` makes one: {first}//.",
            path=text,
            remedy=f"Pass it as text: '{first}//{'/'.join(local.parts[1:])}'; a directory of that "
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
    text = os.fspath(path(value) if not is_remote(value) else value)
    if is_remote(text):
        scheme, known = text.partition("://")[0], _tensorflow_schemes()
        if scheme not in known:
            checks.fail(
                f"TensorFlow, which reads and writes this path, does not know {scheme}://.",
                path=text,
                remedy=f"It knows {', '.join(f'{one}://' for one in sorted(known))}; `import "
                "tensorflow_io` adds some. Use one of these, or a path of this machine.",
            )
    return os.fspath(value)


def _tensorflow_schemes() -> set[str]:
    if importlib.util.find_spec("tensorflow") is None:
        return set()
    import tensorflow as tf

    return {scheme for scheme in tf.io.gfile.get_registered_schemes() if scheme}


@contextlib.contextmanager
def reporting(url: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what goes wrong with a path in the block, if it is remote, as one sentence about it."""
    try:
        yield
    except errors.InputError:
        raise
    # gcsfs, s3fs, TensorFlow and what they stand on have no common kind of error.
    except Exception as error:
        if not is_remote(url):
            raise
        raise _as_sentence(error, os.fspath(url)) from error


def _as_sentence(error: Exception, url: str) -> errors.RemoteFileError:
    kind, name, reason = errors.RemoteFileError, type(error).__name__, _reason(error)
    number, sentence = (
        errno.EIO,
        f"{url} cannot be used ({reason}). Check the path and the network.",
    )
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        kind, number, reason = errors.NoRemoteFileError, errno.ENOENT, os.strerror(errno.ENOENT)
        sentence = f"There is no such file, directory or bucket: {url}. Check the path."
    elif isinstance(error, PermissionError) or name in _PERMISSION:
        number = errno.EACCES
        sentence = (
            f"There is no permission to use {url} ({reason}). Check the credentials of this "
            "machine and the rights of their account."
        )
    reported = kind(sentence)
    reported.errno, reported.strerror, reported.filename = number, reason, url
    return reported


def _reason(error: Exception) -> str:
    """First line of a library's message, without the server's answer."""
    message = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    first = str(message).strip().partition("\n")[0].partition(" with body")[0]
    first = re.sub(r"^\S+://\S+; ", "", first)  # TensorFlow's, of the hidden file perhaps
    return first.rstrip(".") or type(error).__name__


def _system(url: str) -> Any:
    """Return the file system that knows the scheme."""
    try:
        from fsspec.core import url_to_fs

        # Other processes write there too, so that nothing may be remembered.
        return url_to_fs(url, use_listings_cache=False)[0]
    except (ImportError, ValueError) as error:  # no fsspec, not the package it needs, or a typo
        checks.fail(
            f"No installed package reads and writes {url.partition('://')[0]}:// "
            f"({_reason(error)}).",
            path=url,
            remedy="For Google's storage run `pip install 'kdpkit[storage]'` (fsspec and gcsfs), "
            "for others fsspec and its package (s3fs for s3://); or check the spelling.",
        )


def make_writable(directory: AnyPath) -> None:
    """Make a directory if need be, and write a file there that is gone again: before a long run.

    Raises:
        FileInputError: It cannot be made or written.
    """
    if isinstance(directory, RemotePath):
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
