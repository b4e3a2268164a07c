"""A dataset's cache on disk that is whole or is not there.

`Dataset.cache(filename)` leaves a lock behind when its first pass is cut short, which stops the
next run, and trusts any file under its name. Here the first pass runs to its end in a directory
of its own, which is then moved into place with a manifest of what it holds. Each pipeline has its
own place, named by TensorFlow's fingerprint of it, so several may share one cache directory.
"""

import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from kdpkit import _checks

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
    place = Path(directory) / f"kdpkit-{int(dataset.fingerprint()):016x}"
    try:
        if _read_manifest(place) != _checksums(place):
            _fill(fill_from() if fill_from else dataset, place)
    except OSError as error:
        raise _checks.FileInputError(
            f"The cache cannot be kept there ({error.strerror}): {place}. Give `cache` a directory "
            "where you may write, 'memory', or None."
        ) from error
    return dataset.cache(str(place / _PREFIX))


def _fill(dataset: tf.data.Dataset, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with _building_beside(place) as building:
        for _ in dataset.cache(str(building / _PREFIX)):
            pass
        (building / _MANIFEST).write_text(json.dumps(_checksums(building)))
        if _read_manifest(place) == _checksums(place):
            return  # another process was quicker
        shutil.rmtree(place, ignore_errors=True)
        building.rename(place)


@contextlib.contextmanager
def _building_beside(place: Path) -> Iterator[Path]:
    """Give a directory on the same file system, gone afterwards whatever happens."""
    building = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _read_manifest(place: Path) -> Any:
    try:
        return json.loads((place / _MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _checksums(place: Path) -> dict[str, int]:
    return {file.name: _checksum(file) for file in sorted(place.glob(f"{_PREFIX}*"))}


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
