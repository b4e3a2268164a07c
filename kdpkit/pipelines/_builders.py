"""Whole input pipelines, in the one order that is right."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kdpkit import _checks
from kdpkit._tuning import untuned
from kdpkit.pipelines import _disk_cache, _transforms
from kdpkit.pipelines._counting import count_batches, refuse_repeats, require_dataset
from kdpkit.pipelines._epochs import EpochCounter, MovableDataset, at_most
from kdpkit.pipelines._padding import pad_to_global_batch
from kdpkit.pipelines._services import prepare_with_services
from kdpkit.pipelines._tracing import rewritten

_REMAINDERS = ("drop", "pad", "keep")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline keeps, shuffles and prepares its examples.

    Args:
        cache: `"memory"`, the path of a directory, also as `gs://bucket/cache` (see `cache`), or
            None.
        shuffle_buffer: Examples to draw from when shuffling; 0 keeps the order.
        seed: Fixes the order and the augmentation of every epoch.
        prefetch: Batches prepared ahead.
        remainder: What becomes of a smaller last training batch: `"drop"` leaves it out, `"pad"`
            fills it up (see `pad_to_global_batch`), `"keep"` gives it as it is: on several
            replicas only with `kdpkit.training`, as plain Keras weights its examples wrongly.
    """

    cache: str | os.PathLike[str] | None = "memory"
    shuffle_buffer: int = 10_000
    seed: int = 0
    prefetch: int = tf.data.AUTOTUNE
    remainder: str = "drop"

    def __post_init__(self) -> None:
        _checks.integer("shuffle_buffer", self.shuffle_buffer, minimum=0)
        if _checks.integer("seed", self.seed, minimum=0) >= 1 << 63:
            _checks.refuse("`seed` must be below 2**63.", seed=self.seed)
        _checks.one_of("remainder", self.remainder, _REMAINDERS)
        if self.prefetch != tf.data.AUTOTUNE:
            _checks.integer("prefetch", self.prefetch)


def train_pipeline(
    source: tf.data.Dataset,
    config: PipelineConfig = PipelineConfig(),
    *,
    global_batch_size: int,
    replicas: int = 1,
    keep: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    services: Sequence[str] = (),
    augment: Callable[[Any, Any], Any] | None = None,
    steps_per_epoch: int | None = None,
    initial_epoch: int = 0,
    initial_step: int = 0,
) -> tf.data.Dataset:
    """Build the training input: filter, prepare, cache, shuffle, batch, augment, prefetch.

    One iteration of the result is one epoch. Its order and its augmentation depend on the seed,
    the epoch and the place in it alone: every epoch has its own, the same on any number of
    replicas. `kdpkit.callbacks.Resume` moves it to where a run stopped, as `initial_epoch` and
    `initial_step` do by hand. An epoch counts as given once its last batch has been handed on, so
    looking at a batch or two costs nothing.

    Under a strategy plain Keras takes a few batches ahead to build the model. Where an epoch has no
    more than these (up to five), epochs are numbered from 1 there; `kdpkit.training.replica_exact`
    builds without taking any.

    Args:
        source: Single examples, of finite number.
        config: See `PipelineConfig`.
        global_batch_size: Examples in a batch, over all replicas.
        replicas: Replicas that share a batch, evenly: `strategy.num_replicas_in_sync`.
        keep: A predicate on an example; others are left out.
        prepare: A function of an example, applied once, before the cache.
        services: Addresses of processes in which the source is read and `keep` and `prepare` run
            (see `prepare_with_services`); nothing else changes. They are needed until the cache
            is filled, and not at all if a directory has it whole; with `cache=None` always.
        augment: A function of a whole batch and a seed (two integers), applied afresh in every
            epoch, after the cache; draw with `tf.random.stateless_*`. Python's `if` and `for` over
            tensors work in it, as in `keep` and `prepare`.
        steps_per_epoch: Batches in an epoch; None takes all there are. With fewer, each epoch
            gives the first of its own order. Leave `fit(steps_per_epoch=...)` alone: Keras would
            go on through the data and cut epochs short where it ends.
        initial_epoch: The epoch to begin with.
        initial_step: Batches of that epoch that have been trained on. With `fit` train what is
            left of it in a call of its own, with `epochs=initial_epoch + 1` and `steps_per_epoch`
            the batches left, because Keras takes the first epoch's length for every epoch.

    Returns:
        A dataset of batches, of known length unless `initial_step` shortens the first epoch: in
        an epoch of unknown length Keras counts a step too many. Where `keep` or the source hides
        the length, the examples are counted: while the cache fills, or with `cache=None` by
        reading them once more.

    Raises:
        ValueError: The replicas do not divide the batch, the source repeats (`fit(epochs=N)`
            would repeat it again), nothing is left after `keep`, or less than a batch.

    >>> numbers = tf.data.Dataset.range(8)
    >>> train = train_pipeline(numbers, global_batch_size=4, replicas=2)
    >>> epochs = [[int(number) for batch in train for number in batch] for _ in range(2)]
    >>> epochs[0] != epochs[1], sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    (True, True)
    """
    initial_epoch = _checks.integer("initial_epoch", initial_epoch, minimum=0)
    initial_step = _checks.integer("initial_step", initial_step, minimum=0)
    cut = _batching(global_batch_size, replicas, config.remainder, mode="train")
    examples = _examples(source, config, keep, prepare, services)
    batches = _epoch_length(count_batches(examples.apply(cut)), steps_per_epoch)
    buffer_size = min(config.shuffle_buffer, count_batches(examples))
    skipped_epochs, first_step = divmod(initial_step, batches)
    counter = EpochCounter(
        batches=batches, initial_epoch=initial_epoch + skipped_epochs, initial_step=first_step
    )

    fresh = augment and rewritten(augment)

    def one_epoch(epoch: Any, skipped: Any) -> tf.data.Dataset:
        seed = tf.random.fold_in(tf.constant([config.seed, 0], tf.int64), epoch)
        ordered = _shuffled(examples, buffer_size, seed)
        indexed = ordered.apply(cut).take(batches).skip(skipped).enumerate(skipped)
        if fresh is None:
            return indexed
        return indexed.map(
            lambda index, batch: (index, fresh(batch, tf.random.fold_in(seed, index))),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    given = untuned(counter.dataset(one_epoch, prefetch=config.prefetch))
    checked = given.apply(tf.data.experimental.assert_cardinality(batches))
    train = given if first_step else checked
    movable = at_most(given, batches)
    train.movable = given.movable = MovableDataset(
        movable, counter, batches, global_batch_size, config.seed, examples
    )
    return train


def eval_pipeline(
    source: tf.data.Dataset,
    config: PipelineConfig = PipelineConfig(),
    *,
    global_batch_size: int,
    replicas: int = 1,
    keep: Callable[..., Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    services: Sequence[str] = (),
    remainder: str = "pad",
) -> tf.data.Dataset:
    """Build the input for validation and test: filter, prepare, cache, batch, prefetch.

    Nothing is shuffled, and by default every example is evaluated exactly once: the last batch is
    filled up with rows of weight 0, so use `weighted_metrics`.

    Args:
        source: Single examples, of finite number.
        config: Its `cache` and `prefetch`; see `PipelineConfig`.
        global_batch_size: Examples in a batch, over all replicas.
        replicas: Replicas that share a batch, evenly.
        keep: A predicate on an example; others are left out.
        prepare: A function of an example, applied once, before the cache.
        services: As in `train_pipeline`.
        remainder: `"pad"`, `"drop"` or `"keep"` a smaller last batch.

    Raises:
        ValueError: As `train_pipeline`.

    >>> pairs = tf.data.Dataset.from_tensor_slices(([1.0, 2.0, 3.0], [0, 1, 0]))
    >>> for x, y, weight in eval_pipeline(pairs, global_batch_size=2, replicas=2):
    ...     print(x.numpy(), y.numpy(), weight.numpy())
    [1. 2.] [0 1] [1. 1.]
    [3. 3.] [0 0] [1. 0.]
    """
    cut = _batching(global_batch_size, replicas, remainder, mode="eval")
    batches = _examples(source, config, keep, prepare, services).apply(cut)
    return untuned(batches.prefetch(config.prefetch))


def _epoch_length(available: int, steps_per_epoch: int | None) -> int:
    if steps_per_epoch is None:
        return available
    steps = _checks.integer("steps_per_epoch", steps_per_epoch)
    if steps > available:
        _checks.refuse(
            f"An epoch cannot have more batches than the data gives, which is {available}.",
            steps_per_epoch=steps,
            remedy="Train for more epochs instead.",
        )
    return steps


def _shuffled(examples: tf.data.Dataset, buffer_size: int, seed: Any) -> tf.data.Dataset:
    """Shuffle in the order of the seed alone; it is called while a graph is being traced."""
    if buffer_size == 0:
        return examples
    tf.random.set_seed(1)  # of this graph; else the program's global seed has a say in the order
    order = tf.random.stateless_uniform([], seed, minval=None, maxval=None, dtype=tf.int64)
    return examples.shuffle(buffer_size, seed=order, reshuffle_each_iteration=False)


def _batching(
    global_batch_size: int, replicas: int, remainder: str, *, mode: str
) -> _transforms.Transform:
    _checks.one_of("remainder", remainder, _REMAINDERS)
    cut = _transforms.batch_for(
        global_batch_size, replicas=replicas, drop_remainder=remainder == "drop"
    )
    if remainder != "pad":
        return cut
    return _transforms.chain(cut, pad_to_global_batch(global_batch_size, mode=mode))


def _examples(
    source: tf.data.Dataset,
    config: PipelineConfig,
    keep: Callable[..., Any] | None,
    prepare: Callable[..., Any] | None,
    services: Sequence[str],
) -> tf.data.Dataset:
    """Filter, prepare and cache, then count: a cache fills while it is counted."""
    require_dataset("source", source)
    refuse_repeats(source)
    examples = source if keep is None else source.filter(keep)
    if services:
        examples = _prepared_by_services(examples, config, prepare, services)
    else:
        if prepare is not None:
            examples = examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        if config.cache is not None:
            examples = examples.apply(_transforms.cache(config.cache))
    count = count_batches(examples)
    if count == 0:
        _checks.refuse(
            "No example is left to train or evaluate on: the source is empty, or `keep` is false "
            "for every example.",
            source=source.element_spec,
            remedy="Check the data, or loosen `keep`.",
        )
    return examples.apply(tf.data.experimental.assert_cardinality(count))


def _prepared_by_services(
    examples: tf.data.Dataset,
    config: PipelineConfig,
    prepare: Callable[..., Any] | None,
    services: Sequence[str],
) -> tf.data.Dataset:
    """Prepare and cache; a cache on disk is the one that is filled without services."""
    if prepare is None:
        _checks.refuse(
            "`services` are where `prepare` runs, and there is none.",
            services=services,
            remedy="Give `prepare`, or leave out `services`.",
        )
    stage = prepare_with_services(prepare, services)
    if config.cache is None:
        return examples.apply(stage)
    if config.cache == "memory":
        return examples.apply(stage).apply(_transforms.cache())
    here = examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return _disk_cache.cached_on_disk(here, config.cache, fill_from=lambda: examples.apply(stage))
