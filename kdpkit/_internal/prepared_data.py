"""A cache of prepared data that is read back whole and right, or not at all.

A file holds the SHA-256 of everything after it, a header, and the arrays, each in numpy's own
format without pickle. Its name and header hold the key: a digest of all that the data were made
from. Any damage changes the digest, so that no damaged file is ever trusted.
"""

# ruff: noqa: T201 the recipes' voice

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from kdpkit import _checks, _files, _storage

Prepared = dict[str, np.ndarray | list[str]]

_DIGEST_BYTES = 64


def prepared(
    label: str,
    build: Callable[[], Mapping[str, Any]],
    *,
    key: Any,
    cache_dir: str | os.PathLike[str] | None,
) -> Prepared:
    """Give what `build()` gives, from the cache if it was built before from the same things.

    What is built is written in one piece when it is complete, so that an interrupted run leaves
    nothing behind, and several processes may build the same at once. A damaged or foreign file is
    built anew, and a line is printed; where the directory cannot be written the data are used
    uncached, and a line says so. Files of other keys stay until you delete them.

    Args:
        label: What the data are, in a few words; begins the file's name and the printed lines.
        build: Makes the data: a dictionary of arrays and of lists of strings, by name.
        key: Everything that the data depend on: settings, lines of text, arrays, versions of
            other packages, in any nesting of tuples, lists, dictionaries and dataclasses. A
            `pathlib.Path` stands for the content of its file. kdpkit's own code is always added.
        cache_dir: Directory of the cache, also in object storage, as `gs://bucket/cache`; None
            builds without it.

    Returns:
        A dictionary of arrays and lists of strings, equal whether built or read.

    Raises:
        ValueError: A part of the key or of the data that cannot be stored faithfully.

    >>> data = prepared(
    ...     "squares", lambda: {"square": np.arange(3) ** 2}, key={"count": 3}, cache_dir=None
    ... )
    >>> data["square"].tolist()
    [0, 1, 4]
    """
    if cache_dir is None:
        return _plain(build())
    digest = _fingerprint((_own_code(), label, key))
    path = (
        _storage.path(cache_dir)
        / f"{re.sub(r'[^a-z0-9]+', '-', label.lower())}-{digest[:32]}.cache"
    )
    found = _read(path, digest, label)
    if found is not None:
        return found
    data = _plain(build())
    try:
        with _files.replacing(path) as temporary:
            _write(temporary, digest, data)
    except OSError as error:
        print(f"{label}: used uncached, as {path} cannot be written ({error.strerror}).")
    return data


def _read(path: _storage.AnyPath, digest: str, label: str) -> Prepared | None:
    """Read the cached data; None if they are missing or, with a printed line, not to be trusted."""
    try:
        with _files.fetched(path) as local, local.open("rb") as stream:
            found = _read_verified(stream, digest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        print(f"{label}: built anew, as {path} cannot be read ({error.strerror}).")
        return None
    if found is None:
        print(f"{label}: built anew, as {path} is damaged.")
    else:
        print(f"{label}: read from {path}.")
    return found


def _read_verified(stream: BufferedReader, digest: str) -> Prepared | None:
    written = stream.read(_DIGEST_BYTES)
    if hashlib.file_digest(stream, "sha256").hexdigest().encode() != written:
        return None
    stream.seek(_DIGEST_BYTES)
    header = _text_of(_load(stream))
    if header["key"] != digest:
        return None
    return {
        name: _text_of(_load(stream)) if kind == "text" else _load(stream)
        for name, kind in header["parts"].items()
    }


def _write(path: Path, digest: str, data: Prepared) -> None:
    kinds = {name: "text" if isinstance(part, list) else "array" for name, part in data.items()}
    with path.open("x+b") as stream:
        stream.write(bytes(_DIGEST_BYTES))
        _save(stream, _bytes_of({"key": digest, "parts": kinds}))
        for part in data.values():
            _save(stream, _bytes_of(part) if isinstance(part, list) else part)
        stream.seek(_DIGEST_BYTES)
        content = hashlib.file_digest(stream, "sha256").hexdigest().encode()
        stream.seek(0)
        stream.write(content)


def _load(stream: BufferedReader) -> Any:
    return np.lib.format.read_array(stream, allow_pickle=False)


def _save(stream: BufferedRandom, array: np.ndarray) -> None:
    np.lib.format.write_array(stream, array, allow_pickle=False)


def _bytes_of(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), "uint8")


def _text_of(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def _plain(data: Mapping[str, Any]) -> Prepared:
    """Turn each part into what it is when it is read back: an array or a list of strings."""
    return {name: _plain_part(name, part) for name, part in data.items()}


def _plain_part(name: str, part: Any) -> np.ndarray | list[str]:
    if isinstance(part, list | tuple) and all(isinstance(item, str) for item in part):
        return list(part)
    try:
        array = np.asarray(part)
    except ValueError:  # rows of different length
        array = np.empty((), object)
    if array.dtype.kind in "OV":
        _checks.refuse(
            f"Prepared data are arrays of numbers or lists of strings, which {name!r} is not.",
            dtype=array.dtype.name,
            remedy="Store ragged rows as their values and their lengths.",
        )
    return array


@functools.cache
def _own_code() -> str:
    """Give a digest of kdpkit's source: other code may prepare the same input differently."""
    root = Path(__file__).parent
    return _fingerprint([path.read_bytes() for path in sorted(root.rglob("*.py"))])


def _fingerprint(value: Any) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(value):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(value: Any) -> Iterator[bytes]:
    """Give bytes that differ for different values: each has its type and its length before it."""
    match value:
        case None | bool() | int() | float():
            yield from _tagged(type(value).__name__, repr(value).encode())
        case str():
            yield from _tagged("str", value.encode("utf-8", "surrogatepass"))
        case bytes():
            yield from _tagged("bytes", value)
        case Path() | _storage.RemotePath():
            yield from _tagged("file", _files.readable(value).read_bytes())
        case list() | tuple():
            yield from _tagged("sequence", str(len(value)).encode())
            for item in value:
                yield from _chunks(item)
        case dict():
            yield from _tagged("dict", str(len(value)).encode())
            items = ((_fingerprint(name), _fingerprint(item)) for name, item in value.items())
            yield from _chunks(sorted(items))
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            yield from _tagged("array", f"{value.dtype} {value.shape}".encode())
            yield from _tagged("data", value.tobytes())
        case _ if is_dataclass(value) and not isinstance(value, type):
            yield from _tagged("dataclass", type(value).__qualname__.encode())
            yield from _chunks({field.name: getattr(value, field.name) for field in fields(value)})
        case _:
            _checks.refuse(
                "Parts of a cache's key are numbers, strings, paths, arrays, and tuples, lists, "
                "dictionaries or dataclasses of them.",
                part=value,
            )


def _tagged(kind: str, content: bytes) -> tuple[bytes, bytes]:
    return f"{kind}:{len(content)}:".encode(), content
