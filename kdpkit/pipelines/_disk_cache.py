"""A dataset's cache on disk, which is only used if it is complete.

If the first pass of `Dataset.cache(filename)` is interrupted, it leaves a lock that stops the next
run; and it trusts any file with its name. Here the first pass fills a temporary directory
completely, which is then renamed, with a manifest of its content. Each pipeline has its own
directory, named by TensorFlow's fingerprint, so several pipelines can share a cache directory.

Object storage has no directories to rename. There the files are uploaded one by one, each
atomically, and the manifest with their checksums last.
"""

import json
import os
import shutil
import tempfile
import warnings
import zlib
from pathlib import Path

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import atomic_files, storage
from kdpkit.pipelines._stages import PYTHON, STORED, Stage, paths

_MANIFEST = "manifest.json"
_PREFIX = "examples"


def cached_on_disk(dataset: tf.data.Dataset, directory: str | os.PathLike[str]) -> tf.data.Dataset:
    """Cache `dataset` in its own directory inside `directory`, filled unless it is complete."""
    root = storage.path(storage.require_tensorflow(directory))
    target = root / f"kdpkit-{int(dataset.fingerprint()):016x}"
    try:
        if _is_complete(target):
            _warn_of_unknown(dataset, target)
        else:
            _fill(dataset, target)
    except OSError as error:
        raise errors.FileInputError(
            f"The cache cannot be kept ({error.strerror}): {target}. Set `cache` to a directory "
            "where you may write, 'memory', or None."
        ) from error
    return dataset.cache(str(target / _PREFIX))


def _warn_of_unknown(dataset: tf.data.Dataset, target: storage.AnyPath) -> None:
    """Warn that the cache of an earlier pipeline is used, which may have been different."""
    stages = [stage for stage, _ in paths(Stage(dataset))]
    unknown = ["Python functions"] * any(stage.runs(PYTHON) for stage in stages)
    unknown += ["variables or lookup tables"] * any(stage.runs(STORED) for stage in stages)
    if unknown:
        warnings.warn(
            f"The examples come from the cache in {target}. Its pipeline has "
            f"{' and '.join(unknown)}, and whether these are the same as when the cache was "
            "filled cannot be known. If they are not, delete it, or pass another directory.",
            stacklevel=2,
        )


def _fill(dataset: tf.data.Dataset, target: storage.AnyPath) -> None:
    parent = None  # any local file system will do, since the files are copied later
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
