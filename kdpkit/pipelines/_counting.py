"""Count the batches of a dataset, whose number `filter` hides."""

from typing import Any, NoReturn

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._stages import Stage, paths


def count_batches(dataset: tf.data.Dataset) -> int:
    """Return the number of elements of a dataset (batches, if it is batched).

    `len(dataset)` raises after `filter`, cached or not. This function iterates a dataset of unknown
    length once, which also fills a cache inside it. The steps of a decay schedule are
    `count_batches(train) * epochs`. Under a strategy a global batch counts once.

    Raises:
        ValueError: The dataset never ends.

    >>> even = tf.data.Dataset.range(10).filter(lambda number: number % 2 == 0)
    >>> count_batches(even.batch(2, drop_remainder=True))
    2
    """
    require_dataset("dataset", dataset)
    known = cardinality(dataset)
    if known is not None:
        return known
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def require_dataset(name: str, value: Any) -> None:
    """Raise unless `value` is a `tf.data.Dataset`."""
    if not isinstance(value, tf.data.Dataset):
        checks.fail(
            f"`{name}` must be a tf.data.Dataset.",
            **{name: type(value).__name__},
            remedy="Make one of arrays with `tf.data.Dataset.from_tensor_slices`.",
        )


def cardinality(dataset: tf.data.Dataset) -> int | None:
    """Return the length of a dataset, None if unknown; raise for endless ones."""
    count = tf.get_static_value(dataset.cardinality())  # None while a graph is being traced
    if count == tf.data.INFINITE_CARDINALITY:
        _raise_endless("`dataset` never ends")
    return None if count in (None, tf.data.UNKNOWN_CARDINALITY) else int(count)


def require_no_repeat(dataset: tf.data.Dataset) -> None:
    """Raise for a `repeat` in a source: together with `fit(epochs=N)` it multiplies the data."""
    end = Stage(dataset)
    repeats = any(stage.kind == "repeat" for stage, _ in paths(end))
    if end.cardinality == tf.data.INFINITE_CARDINALITY or repeats:
        _raise_endless("`source` repeats its examples")


def _raise_endless(problem: str) -> NoReturn:
    checks.fail(
        f"{problem}, and `fit(epochs=N)` would repeat it again.",
        remedy="Take `.repeat(...)` out of the pipeline and let `epochs` count the passes.",
    )
