"""A cache of prepared data whose files are complete and valid, or not used.

A file's name and its header hold the key: a digest of all that the data were made from.
"""

# ruff: noqa: T201 the recipes' voice

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

import kdpkit
from kdpkit._internal import array_files, atomic_files, checks, storage

Prepared = dict[str, np.ndarray | list[str]]


def prepared(
    label: str,
    build: Callable[[], Mapping[str, ArrayLike]],
    *,
    key: object,
    cache_dir: str | os.PathLike[str] | None,
) -> Prepared:
    """Return what `build()` returns, from the cache if it was built before from the same things.

    What is built is written atomically when it is complete, so that an interrupted run leaves
    nothing behind, and several processes may build the same at once. A damaged or foreign file is
    built again, and a line is printed; where the directory cannot be written the data are used
    uncached, with a line that reports it. Files of other keys stay until you delete them.

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
        storage.path(cache_dir) / f"{re.sub(r'[^a-z0-9]+', '-', label.lower())}-{digest[:32]}.cache"
    )
    found = _read(path, digest, label)
    if found is not None:
        return found
    data = _plain(build())
    try:
        with atomic_files.replacing(path) as temporary:
            _write(temporary, digest, data)
    except OSError as error:
        print(f"{label}: used uncached, as {path} cannot be written ({error.strerror}).")
    return data


def _read(path: storage.AnyPath, digest: str, label: str) -> Prepared | None:
    """Read the cached data; None if they are missing or, with a printed line, not to be trusted."""
    try:
        with atomic_files.fetched(path) as local:
            header, arrays = array_files.read(local)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        print(f"{label}: built again, as {path} cannot be read ({error.strerror}).")
        return None
    except array_files.DamagedError:
        header = {}
    if header.get("key") != digest:
        print(f"{label}: built again, as {path} is damaged.")
        return None
    print(f"{label}: read from {path}.")
    return {
        name: json.loads(array.tobytes()) if kind == "text" else array
        for (name, kind), array in zip(header["parts"].items(), arrays.values(), strict=True)
    }


def _write(path: Path, digest: str, data: Prepared) -> None:
    parts = {name: "text" if isinstance(part, list) else "array" for name, part in data.items()}
    arrays = (_bytes_of(part) if isinstance(part, list) else part for part in data.values())
    # By number: not every name can be one of a file in an archive.
    numbered = {str(number): array for number, array in enumerate(arrays)}
    array_files.write(path, {"key": digest, "parts": parts}, numbered)


def _bytes_of(text: list[str]) -> np.ndarray:
    return np.frombuffer(json.dumps(text).encode(), "uint8")


def _plain(data: Mapping[str, ArrayLike]) -> Prepared:
    """Turn each part into what it is when it is read back: an array or a list of strings."""
    return {name: _plain_part(name, part) for name, part in data.items()}


def _plain_part(name: str, part: ArrayLike) -> np.ndarray | list[str]:
    if isinstance(part, list | tuple) and all(isinstance(item, str) for item in part):
        return list(part)
    try:
        array = np.asarray(part)
    except ValueError:  # vectors of different length
        array = np.empty((), object)
    if array.dtype.kind in "OV":
        checks.fail(
            f"Prepared data are arrays of numbers or lists of strings, which {name!r} is not.",
            dtype=array.dtype.name,
            remedy="Store ragged data as their values and their lengths.",
        )
    return array


@functools.cache
def _own_code() -> str:
    """Return a digest of kdpkit's source: other code may prepare the same input differently."""
    root = Path(kdpkit.__file__).parent
    return _fingerprint([path.read_bytes() for path in sorted(root.rglob("*.py"))])


def _fingerprint(value: object) -> str:
    return _digest(json.dumps(value, sort_keys=True, default=_as_json).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _as_json(value: object) -> dict[str, object]:
    """Stand for a part of a key that JSON does not have."""
    match value:
        case bytes():
            return {"bytes": _digest(value)}
        case Path() | storage.RemotePath():
            return {"file": _digest(atomic_files.readable(value).read_bytes())}
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            return {"array": [str(value.dtype), value.shape, _digest(value.tobytes())]}
        case _ if is_dataclass(value) and not isinstance(value, type):
            own = {field.name: getattr(value, field.name) for field in fields(value)}
            return {"dataclass": type(value).__qualname__, "fields": own}
        case _:
            return checks.fail(
                "Parts of a cache's key are numbers, strings, paths, arrays, and tuples, lists, "
                "dictionaries or dataclasses of them.",
                part=value,
            )
