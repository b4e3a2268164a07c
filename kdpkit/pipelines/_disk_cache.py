"""A dataset's cache on disk that is whole or is not there.

`Dataset.cache(filename)` leaves a lock behind when its first pass is cut short, which stops the
next run, and trusts any file under its name. Here the first pass runs to its end in a directory
of its own, which is then moved into place with a manifest of what it holds. Each pipeline has its
own place, named by TensorFlow's fingerprint of it, so several may share one cache directory.

Object storage has no directories to move. There the files are copied one by one, each of which
appears when it is whole, and the manifest last; it has their checksums.
"""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from kdpkit import _checks, _files, _storage
from kdpkit.pipelines import _structure

_MANIFEST = "manifest.json"
_PREFIX = "examples"


def cached_on_disk(
    dataset: tf.data.Dataset,
    directory: str | os.PathLike[str],
    *,
    fill_from: Callable[[], tf.data.Dataset] | None = None,
) -> tf.data.Dataset:
    """Cache `dataset` inside `directory`, filling its place there unless that is whole.

    `fill_from` makes a dataset of the same examples to fill it from, called when it is needed.
    """
    root = _storage.path(_storage.require_tensorflow(directory))
    place = root / f"kdpkit-{int(dataset.fingerprint()):016x}"
    try:
        if _read_manifest(place) != _checksums(place):
            _fill(fill_from() if fill_from else dataset, place)
        else:
            _warn_of_unknown(dataset, place)
    except OSError as error:
        raise _checks.FileInputError(
            f"The cache cannot be kept there ({error.strerror}): {place}. Give `cache` a directory "
            "where you may write, 'memory', or None."
        ) from error
    return dataset.cache(str(place / _PREFIX))


def _warn_of_unknown(dataset: tf.data.Dataset, place: _storage.AnyPath) -> None:
    """Say that a pipeline is taken for the one before which may be another."""
    stages = (stage for stage, _ in _structure.paths(_structure.end_of(dataset)))
    functions = [function for stage in stages for function in stage.functions]
    unknown = [
        what
        for what, is_there in (
            ("Python functions", any(one.calls_python for one in functions)),
            ("variables or lookup tables", any(one.looks_up for one in functions)),
        )
        if is_there
    ]
    if unknown:
        warnings.warn(
            f"The examples come from the cache in {place}. Its pipeline has "
            f"{' and '.join(unknown)}, and whether these are the same as when the cache was "
            "filled cannot be known. If they are not, delete it, or give another directory.",
            stacklevel=2,
        )


def _fill(dataset: tf.data.Dataset, place: _storage.AnyPath) -> None:
    with _building(place) as building:
        for _ in dataset.cache(str(building / _PREFIX)):
            pass
        (building / _MANIFEST).write_text(json.dumps(_checksums(building)))
        if _read_manifest(place) == _checksums(place):
            return  # another process was quicker
        if isinstance(place, _storage.RemotePath):
            for file in [*sorted(building.glob(f"{_PREFIX}*")), building / _MANIFEST]:
                (place / file.name).upload(file)
            return
        shutil.rmtree(place, ignore_errors=True)
        building.rename(place)


@contextlib.contextmanager
def _building(place: _storage.AnyPath) -> Iterator[Path]:
    """Give a directory, beside a local place on its file system, gone whatever happens."""
    if isinstance(place, _storage.RemotePath):
        building = Path(tempfile.mkdtemp())
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _read_manifest(place: _storage.AnyPath) -> Any:
    try:
        return json.loads((place / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def _checksums(place: _storage.AnyPath) -> dict[str, int]:
    return {file.name: _checksum(file) for file in place.glob(f"{_PREFIX}*")}


def _checksum(file: _storage.AnyPath) -> int:
    checksum = 0
    with _files.fetched(file) as local, local.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
