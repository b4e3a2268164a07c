"""A dataset's cache on disk that is complete or not used.

`Dataset.cache(filename)` leaves a lock behind when its first pass is cut short, which stops the
next run, and trusts any file under its name. Here the first pass runs to its end in a directory of
its own, which is then moved to its path with a manifest of what it holds. Each pipeline has its own
directory, named by TensorFlow's fingerprint of it, so several may use one cache directory.

Object storage has no directories to move. There the files are copied one by one, each of which
appears when it is complete, and the manifest last; it has their checksums.
"""

import json
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import atomic_files, storage
from kdpkit.pipelines import _structure

_MANIFEST = "manifest.json"
_PREFIX = "examples"


def cached_on_disk(
    dataset: tf.data.Dataset,
    directory: str | os.PathLike[str],
    *,
    fill_from: Callable[[], tf.data.Dataset],
) -> tf.data.Dataset:
    """Cache `dataset` inside `directory`, filling its own directory there unless that is complete.

    `fill_from` makes a dataset of the same examples to fill it from, called when it is needed.
    """
    root = storage.path(storage.require_tensorflow(directory))
    target = root / f"kdpkit-{int(dataset.fingerprint()):016x}"
    try:
        if _is_complete(target):
            _warn_of_unknown(dataset, target)
        else:
            _fill(fill_from(), target)
    except OSError as error:
        raise errors.FileInputError(
            f"The cache cannot be kept ({error.strerror}): {target}. Set `cache` to a directory "
            "where you may write, 'memory', or None."
        ) from error
    return dataset.cache(str(target / _PREFIX))


def _warn_of_unknown(dataset: tf.data.Dataset, target: storage.AnyPath) -> None:
    """Warn that a pipeline is taken for an earlier one, which may have been another."""
    stages = _structure.paths(_structure.end_of(dataset))
    functions = [function for stage, _ in stages for function in stage.functions]
    unknown = ["Python functions"] * any(one.calls_python for one in functions)
    unknown += ["variables or lookup tables"] * any(one.looks_up for one in functions)
    if unknown:
        warnings.warn(
            f"The examples come from the cache in {target}. Its pipeline has "
            f"{' and '.join(unknown)}, and whether these are the same as when the cache was "
            "filled cannot be known. If they are not, delete it, or pass another directory.",
            stacklevel=2,
        )


def _fill(dataset: tf.data.Dataset, target: storage.AnyPath) -> None:
    parent = None  # any file system does for what is copied later
    if isinstance(target, Path):
        parent = target.parent
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", dir=parent, ignore_cleanup_errors=True
    ) as directory:
        building = Path(directory)
        for _ in dataset.cache(str(building / _PREFIX)):
            pass
        (building / _MANIFEST).write_text(json.dumps(_checksums(building)))
        if _is_complete(target):
            return  # another process was quicker
        if isinstance(target, Path):
            shutil.rmtree(target, ignore_errors=True)
            building.rename(target)
        else:
            for file in [*sorted(building.glob(f"{_PREFIX}*")), building / _MANIFEST]:
                (target / file.name).upload(file)


def _is_complete(directory: storage.AnyPath) -> bool:
    try:
        return json.loads((directory / _MANIFEST).read_text()) == _checksums(directory)
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return False


def _checksums(directory: storage.AnyPath) -> dict[str, int]:
    return {file.name: _checksum(file) for file in directory.glob(f"{_PREFIX}*")}


def _checksum(file: storage.AnyPath) -> int:
    checksum = 0
    with atomic_files.fetched(file) as local, local.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
