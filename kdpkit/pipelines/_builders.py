"""Complete input pipelines, with the stages in the right order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._epochs import EpochCounter, TrainDataset, rewriting
from kdpkit.pipelines._files import Read, file_names, interleaved
from kdpkit.pipelines._padding import Transform, padded
from kdpkit.pipelines._stages import require_dataset, require_examples

_REMAINDERS = ("drop", "pad", "keep")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline keeps, shuffles and prepares its examples.

    Args:
        cache: Whether prepared examples are kept in memory after they were read once.
        shuffle_buffer: Examples to draw from when shuffling; 0 keeps the order.
        seed: Fixes the order and the augmentation of every epoch.
        remainder: What happens to a smaller last training batch: `"drop"` removes it, `"pad"` pads
            it (see `pad_to_global_batch`; metrics then have to be in `weighted_metrics`), `"keep"`
            keeps it: on several replicas only with `kdpkit.training`, since plain Keras weights its
            examples wrongly.
    """

    cache: bool = True
    shuffle_buffer: int = 10_000
    seed: int = 0
    remainder: str = "drop"

    def __post_init__(self) -> None:
        checks.one_of("cache", self.cache, (True, False))
        checks.integer("shuffle_buffer", self.shuffle_buffer, minimum=0)
        checks.integer("seed", self.seed, minimum=0)
        checks.one_of("remainder", self.remainder, _REMAINDERS)


def train_pipeline(
    source: Any,
    config: PipelineConfig = PipelineConfig(),
    *,
    read: Read | None = None,
    global_batch_size: int,
    replicas: int = 1,
    keep: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    augment: Callable[[Any, Any], Any] | None = None,
    steps_per_epoch: int | None = None,
) -> TrainDataset:
    """Build the training input: filter, prepare, cache, shuffle, batch, augment, prefetch.

    One iteration of the result is one epoch. Its order and augmentation depend only on the seed,
    the epoch and the position in the epoch: they change every epoch, and are the same on any number
    of replicas. `kdpkit.callbacks.Resume` can start it where a run stopped. An epoch is over once
    its last batch was taken, so you can look at a few batches. (Plain Keras takes up to five
    batches to build a model under a strategy: shorter epochs are then numbered from 1.)

    Args:
        source: A finite dataset of single examples; or names of files or a pattern, with `read`.
        config: See `PipelineConfig`.
        read: A function of the name of a file, a string tensor, to a dataset of its examples, such
            as `tf.data.TFRecordDataset`. Up to 16 files are read in parallel, and interleaved, in
            the order of their names; without a cache in a new order of files in each epoch.
        global_batch_size: Examples in a batch, over all replicas.
        replicas: Replicas that a batch is split over evenly: `strategy.num_replicas_in_sync`.
        keep: A predicate on an example; only examples for which it is true are kept.
        prepare: A function of an example, applied once, before the cache.
        augment: A function of a batch and a seed (two integers), applied after the cache in every
            epoch; draw with `tf.random.stateless_*`.
        steps_per_epoch: Batches in an epoch, the first ones of its order; None takes all. Do not
            use `fit(steps_per_epoch=...)`: it would cut epochs short where the data ends.

    Returns:
        A dataset of batches, of known length. If `keep` or the source hides it, the examples are
        counted: while the cache fills, or with `cache=False` in an additional pass.

    Raises:
        ValueError: The replicas do not divide the batch; the source repeats (`fit(epochs=N)` would
            repeat it again), has batches, or is of names of files without `read`; a file is not
            there, was cut (which TensorFlow may read as a shorter one) or is not expanded; or fewer
            examples than one batch are left after `keep`.

    >>> train = train_pipeline(tf.data.Dataset.range(8), global_batch_size=4, replicas=2)
    >>> epochs = [[int(number) for batch in train for number in batch] for _ in range(2)]
    >>> epochs[0] != epochs[1], sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    (True, True)
    """
    batched = _batching(global_batch_size, replicas, config.remainder, mode="train")
    fewest = global_batch_size if config.remainder == "drop" else 1
    source = source if read is None else file_names(source, read)
    examples = _examples(source, config, (read, keep, prepare), fewest)
    batches = checks.steps_per_epoch(steps_per_epoch, _count(examples.apply(batched)))
    buffer_size = min(config.shuffle_buffer, _count(examples))
    counter = EpochCounter(batches=batches)
    rewrite = rewriting()
    fresh = augment and rewrite(augment)
    stages = [each and rewrite(each) for each in (read, keep, prepare)]
    files = _count(source) if read and buffer_size and not config.cache else 0

    def one_epoch(epoch: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
        seed = tf.random.fold_in(tf.constant([config.seed, 0], tf.int64), epoch)
        again = _prepared(_shuffled(source, files, seed), *stages) if files else examples
        ordered = _shuffled(again, buffer_size, seed)
        indexed = ordered.apply(batched).take(batches).skip(skipped).enumerate(skipped)
        if fresh is None:
            return indexed
        return indexed.map(
            lambda index, batch: (index, fresh(batch, tf.random.fold_in(seed, index))),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    return TrainDataset(
        untuned(counter.dataset(one_epoch, prefetch=tf.data.AUTOTUNE)),
        counter,
        global_batch_size=global_batch_size,
        seed=config.seed,
        examples=examples,
    )


def eval_pipeline(
    source: Any,
    config: PipelineConfig = PipelineConfig(),
    *,
    read: Read | None = None,
    global_batch_size: int,
    replicas: int = 1,
    keep: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    remainder: str = "keep",
) -> tf.data.Dataset:
    """Build the input for validation or test: filter, prepare, cache, batch, prefetch.

    Nothing is shuffled, and every example is evaluated once: `evaluate` and `fit(validation_data)`
    report the loss and the metrics of one pass over the examples. On several replicas wrap the
    model in `kdpkit.training.replica_exact`: plain Keras raises if the replicas do not divide the
    first batch (TensorFlow), or any (JAX).

    Args:
        source: A finite dataset of single examples; or names of files or a pattern, with `read`.
        config: Its `cache`; see `PipelineConfig`.
        read: As `train_pipeline`, in the order of the files' names.
        global_batch_size: Examples in a batch, over all replicas.
        replicas: Replicas that a batch is split over evenly.
        keep: A predicate on an example; only examples for which it is true are kept.
        prepare: A function of an example, applied once, before the cache.
        remainder: `"keep"` a smaller last batch; `"drop"` it, which leaves examples out; or `"pad"`
            it for TPUs and XLA, which compile for one shape. Padding has weight 0, and the weights
            average 1, so the loss is the same; metrics have to be in `weighted_metrics`, of which
            those that count, such as `TruePositives`, are too large by that factor.

    Raises:
        ValueError: As `train_pipeline`.

    >>> pairs = tf.data.Dataset.from_tensor_slices(([1.0, 2.0, 3.0], [0, 1, 0]))
    >>> for x, y in eval_pipeline(pairs, global_batch_size=2):
    ...     print(x.numpy(), y.numpy())
    [1. 2.] [0 1]
    [3.] [0]
    """
    batched = _batching(global_batch_size, replicas, remainder, mode="eval")
    fewest = global_batch_size if remainder == "drop" else 1
    source = source if read is None else file_names(source, read)
    examples = _examples(source, config, (read, keep, prepare), fewest)
    return untuned(examples.apply(batched).prefetch(tf.data.AUTOTUNE))


def _shuffled(examples: tf.data.Dataset, buffer_size: int, seed: tf.Tensor) -> tf.data.Dataset:
    """Shuffle in an order that depends only on the seed; called while a graph is traced."""
    if buffer_size == 0:
        return examples
    # The seed of this graph; without one the program's global seed would change the order.
    tf.random.set_seed(1)
    order = tf.random.stateless_uniform([], seed, minval=None, maxval=None, dtype=tf.int64)
    return examples.shuffle(buffer_size, seed=order, reshuffle_each_iteration=False)


def _batching(global_batch_size: int, replicas: int, remainder: str, *, mode: str) -> Transform:
    checks.one_of("remainder", remainder, _REMAINDERS)
    size, _ = checks.global_batch(global_batch_size, replicas)

    def batched(examples: tf.data.Dataset) -> tf.data.Dataset:
        batches = examples.batch(size, drop_remainder=remainder == "drop")
        if remainder != "pad":
            return batches
        count = _count(examples) if mode == "eval" else None
        return padded(batches, size, count and -(-count // size) * size / count)

    return batched


def _examples(
    source: tf.data.Dataset, config: PipelineConfig, functions: Sequence[Any], fewest: int
) -> tf.data.Dataset:
    """Read, filter, prepare and cache, then count; counting also fills the cache."""
    read, _, prepare = functions
    if isinstance(source, str):
        remedy = "Pass `read`, such as `tf.data.TFRecordDataset`."
        checks.fail("Names of files need a function that reads them.", source=source, remedy=remedy)
    require_dataset("source", source)
    require_examples(source, name="source", prepared=bool(read or prepare))
    examples = _prepared(source, *functions)
    if config.cache:
        examples = examples.cache()
    count = _count(examples)
    if count < fewest:
        checks.fail(
            "`source` has too few examples for one batch, after `keep`.",
            examples=count,
            fewest=fewest,
            remedy="Check the data, loosen `keep`, or use smaller batches, or a smaller last one.",
        )
    return examples.apply(tf.data.experimental.assert_cardinality(count))


def _prepared(source: tf.data.Dataset, read: Any, keep: Any, prepare: Any) -> tf.data.Dataset:
    examples = source if read is None else interleaved(source, read)
    examples = examples if keep is None else examples.filter(keep)
    if prepare is None:
        return examples
    return examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)


def _count(dataset: tf.data.Dataset) -> int:
    """Return the number of elements, by an iteration where tf.data does not know it."""
    known = int(dataset.cardinality())
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known
    # A function that is called for each element takes longer than to read a small one.
    counts = dataset.window(64).map(lambda *parts: tf.nest.flatten(parts)[0].cardinality())
    return int(counts.reduce(tf.constant(0, tf.int64), lambda total, count: total + count))
