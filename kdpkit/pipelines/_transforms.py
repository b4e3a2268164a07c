"""Single stages: functions from dataset to dataset, for `Dataset.apply`."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.pipelines._stages import require_dataset

Transform: TypeAlias = Callable[[tf.data.Dataset], tf.data.Dataset]


def filter_by(predicate: Callable[..., Any]) -> Transform:
    """Keep the examples for which `predicate` is true.

    The length of the result is unknown to TensorFlow; use `count_batches`.

    >>> even = tf.data.Dataset.range(6).apply(filter_by(lambda number: number % 2 == 0))
    >>> [int(number) for number in even]
    [0, 2, 4]
    """
    return lambda dataset: dataset.filter(predicate)


def longer_than(length: int) -> Callable[..., tf.Tensor]:
    """Return a predicate for texts of more than `length` bytes.

    Use it with `train_pipeline(keep=...)`, `filter_by` or `Dataset.filter`, if the first part of an
    example is the text.

    >>> lines = tf.data.Dataset.from_tensor_slices(["one", "three"])
    >>> [line.numpy() for line in lines.filter(longer_than(3))]
    [b'three']
    """
    length = checks.integer("length", length, minimum=0)
    return lambda text, *_: tf.strings.length(text) > length


def cache() -> Transform:
    """Cache the examples in memory when they are first read.

    Put it before `shuffle`; after it, every epoch would have the same order. For a cache on disk
    write `dataset.cache(filename)`, which trusts any file of that name, and which an interrupted
    first pass leaves locked.

    >>> numbers = tf.data.Dataset.range(3).apply(cache())
    >>> [int(number) for number in numbers]
    [0, 1, 2]
    """
    return lambda dataset: dataset.cache()


def shuffle(buffer_size: int, *, seed: int = 0) -> Transform:
    """Shuffle within a buffer, in a new order each time the dataset is iterated.

    The order is the same for any number of replicas, but `fit` starts more iterators under a
    strategy than on one device, and each draws an order. `train_pipeline` counts epochs instead.

    Args:
        buffer_size: Examples to draw from; use the dataset's size to shuffle uniformly.
        seed: Fixes the sequence of orders.

    >>> numbers = tf.data.Dataset.range(5).apply(shuffle(5, seed=3))
    >>> first, second = ([int(number) for number in numbers] for _ in range(2))
    >>> first != second, sorted(first) == sorted(second)
    (True, True)
    """
    buffer_size = checks.integer("buffer_size", buffer_size)
    seed = checks.integer("seed", seed, minimum=0)
    return lambda dataset: dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True)


def batch_for(
    global_batch_size: int, *, replicas: int = 1, drop_remainder: bool = True
) -> Transform:
    """Batch examples with a global batch size that the replicas divide.

    `tf.distribute` then gives each replica `global_batch_size / replicas` examples of every
    batch. With `drop_remainder=False` the last batch may be smaller, and uneven.

    Raises:
        ValueError: The replicas do not divide the batch, or the dataset is known to be smaller than
            one batch.

    >>> [batch.shape[0] for batch in tf.data.Dataset.range(10).apply(batch_for(4, replicas=2))]
    [4, 4]
    """
    global_batch_size, replicas = checks.global_batch(global_batch_size, replicas)

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        examples = _cardinality(dataset)
        if drop_remainder and examples is not None and examples < global_batch_size:
            checks.fail(
                "The dataset has too few examples for one full batch.",
                examples=examples,
                global_batch_size=global_batch_size,
                remedy="Use a smaller batch, or keep the smaller last one.",
            )
        return dataset.batch(global_batch_size, drop_remainder=drop_remainder)

    return apply


def prefetch(batches: int = tf.data.AUTOTUNE) -> Transform:
    """Prepare the next batches during training on the current one.

    >>> tf.data.Dataset.range(3).apply(prefetch(2)).cardinality().numpy()
    np.int64(3)
    """
    if batches != tf.data.AUTOTUNE:
        batches = checks.integer("batches", batches)
    return lambda dataset: dataset.prefetch(batches)


def auto_shard(policy: str = "data") -> Transform:
    """Set how several workers shard the dataset.

    By default TensorFlow guesses, and with one file and two workers leaves one worker without data.
    The policy only matters under MultiWorkerMirroredStrategy; the replicas of one process always
    split its global batches. `replica_exact` and `TrainingLoop` take only `"data"`: the others give
    other batches than one device has.

    Args:
        policy: With `"data"` every worker reads all examples and keeps its shard; with `"file"` the
            files are sharded, at least one per worker; with `"off"` every worker sees everything,
            for a source that is already sharded.

    >>> stage = auto_shard("data")
    >>> stage(tf.data.Dataset.range(3)).options().experimental_distribute.auto_shard_policy.name
    'DATA'
    """
    checks.one_of("policy", policy, ("data", "file", "off"))
    options, policies = tf.data.Options(), tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies[policy.upper()]
    return lambda dataset: dataset.with_options(options)


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
    known = _cardinality(dataset)
    if known is not None:
        return known
    return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))


def _cardinality(dataset: tf.data.Dataset) -> int | None:
    """Return the length of a dataset, None if unknown; raise for endless ones."""
    count = tf.get_static_value(dataset.cardinality())  # None while a graph is being traced
    if count == tf.data.INFINITE_CARDINALITY:
        raise_endless("`dataset` never ends")
    return None if count in (None, tf.data.UNKNOWN_CARDINALITY) else int(count)


def raise_endless(problem: str) -> NoReturn:
    """Raise for data that `fit` would repeat once more."""
    checks.fail(
        f"{problem}, and `fit(epochs=N)` would repeat it again.",
        remedy="Take `.repeat(...)` out of the pipeline and let `epochs` count the passes.",
    )
