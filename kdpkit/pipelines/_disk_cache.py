"""A dataset's cache on disk, which is only used if it is complete.

If the first pass of `Dataset.cache(filename)` is interrupted, it leaves a lock that stops the next
run; and it trusts any file with its name. Here the first pass fills a temporary directory
completely, which is then renamed. Each pipeline has its own directory, named by TensorFlow's
fingerprint, so several pipelines can share a cache directory.
"""

import os
import tempfile
import warnings
from pathlib import Path

import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import checks, storage
from kdpkit.pipelines._stages import PYTHON, STORED, Stage, paths

_PREFIX = "examples"


def cached_on_disk(dataset: tf.data.Dataset, directory: str | os.PathLike[str]) -> tf.data.Dataset:
    """Cache `dataset` in its own directory inside `directory`, filled unless it is there."""
    root = storage.path(directory)
    if not isinstance(root, Path):
        checks.fail(
            "A cache is kept in memory, or in a directory of this machine.",
            cache=os.fspath(directory),
            remedy="Pass a local directory, such as '/tmp/cache'.",
        )
    target = root / f"kdpkit-{int(dataset.fingerprint()):016x}"
    try:
        if target.exists():
            _warn_of_unknown(dataset, target)
        else:
            _fill(dataset, target)
    except OSError as error:
        raise errors.FileInputError(
            f"The cache cannot be kept ({error.strerror}): {target}. Set `cache` to a directory "
            "where you may write, 'memory', or None."
        ) from error
    return dataset.cache(str(target / _PREFIX))


def _warn_of_unknown(dataset: tf.data.Dataset, target: Path) -> None:
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


def _fill(dataset: tf.data.Dataset, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as building:
        for _ in dataset.cache(str(Path(building, _PREFIX))):
            pass
        if not target.exists():  # or another process was quicker
            Path(building).rename(target)
