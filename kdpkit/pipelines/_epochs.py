"""Datasets that know their current epoch.

Keras starts more iterators than there are epochs: one to build the model under a strategy, and one
ahead of each epoch. `shuffle(reshuffle_each_iteration=True)` draws an order for each, so the same
seed has different orders on one device and on many. Here an epoch is over when the iterator that
was started last has returned its last batch; older ones, which may still run in a thread, do not
count.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from kdpkit._internal import checks

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Trace one of our functions, and everything it calls, without AutoGraph.

    AutoGraph, which supports `if` and `for` over tensors, takes longer than the tracing.
    """
    return tf.autograph.experimental.do_not_convert(function)


def rewriting() -> Callable[[F], F]:
    """Return a decorator for users' functions, so that AutoGraph rewrites them as `map` would.

    It uses the AutoGraph settings of the place where it is made, wherever the function is called.
    """
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())


class EpochCounter:
    """The position of the next iterator, in a lookup table that the dataset's graph uses.

    Unlike a `tf.Variable`, a table is the same object inside and outside a strategy's scope. A
    dataset that never ends has -1 `batches` in an epoch.
    """

    def __init__(self, *, batches: int) -> None:
        self.batches = batches
        with tf.device("CPU:0"):
            self._table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
            self.move(0, 0)

    def move(self, epoch: int, step: int) -> None:
        """Make the next iterator start at a step of an epoch."""
        keys = tf.constant(["epoch", "moved to epoch", "moved to step", "batches returned"])
        self._table.insert(keys, tf.constant([epoch, epoch, step, 0], tf.int64))
        self._start()

    def position(self) -> tuple[int, int]:
        """Return the epoch of the next iterator, and the batches that it skips."""
        epoch = self._get("epoch")
        return int(epoch), int(self._skipped(epoch))

    def left(self) -> tf.Tensor:
        """Return the number of batches of the next iterator, like `Dataset.cardinality`."""
        if self.batches < 0:
            return tf.constant(self.batches, tf.int64)
        return self.batches - self._skipped(self._get("epoch"))

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Ignore iterators started in this block; earlier ones still count."""
        keys, values = self._table.export()
        try:
            yield
        finally:
            self._table.insert(keys, values)

    def has_given(self) -> bool:
        """Return whether any batch was returned since the last move."""
        return int(self._get("batches returned")) > 0

    def dataset(
        self, one_epoch: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset], *, prefetch: int
    ) -> tf.data.Dataset:
        """Return a dataset of batches in which every complete iteration is the next epoch.

        `one_epoch` takes the epoch and the number of batches to skip, int64 scalars, and returns a
        dataset of `(index, batch)` pairs, where `index` counts the batches from the start of a
        complete epoch; it is traced as written. Batches are counted after the prefetch, so
        prefetched batches do not count.
        """

        @as_written
        def batches(started: tf.Tensor, epoch: tf.Tensor) -> tf.data.Dataset:
            indexed = one_epoch(epoch, self._skipped(epoch))
            return indexed.map(lambda index, batch: (started, epoch, index, batch))

        @as_written
        def begin(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._start(), self._get("epoch")

        start = tf.data.Dataset.range(1).map(begin)
        return start.flat_map(batches).prefetch(prefetch).map(self._count)

    def _start(self) -> tf.Tensor:
        """Count a new iterator; earlier ones are no longer counted."""
        started = self._get("started") + 1
        self._table.insert(tf.constant("started"), started)
        return started

    def _skipped(self, epoch: tf.Tensor) -> tf.Tensor:
        moved_here = tf.equal(epoch, self._get("moved to epoch"))
        return tf.where(moved_here, self._get("moved to step"), tf.constant(0, tf.int64))

    def _get(self, key: str) -> tf.Tensor:
        return self._table.lookup(tf.constant(key))

    @as_written
    def _count(self, started: tf.Tensor, epoch: tf.Tensor, index: tf.Tensor, batch: Any) -> Any:
        """Return a batch, and advance to the next epoch after the last one."""
        counts = tf.equal(started, self._get("started"))
        is_last = tf.equal(index, self.batches - 1)
        next_epoch = tf.where(counts & is_last, epoch + 1, self._get("epoch"))
        returned = self._get("batches returned") + tf.cast(counts, tf.int64)
        keys = tf.constant(["epoch", "batches returned"])
        self._table.insert(keys, tf.stack([next_epoch, returned]))
        return batch


class TrainDataset(tf.data.Dataset):
    """The batches of `train_pipeline`, with attributes for other parts of kdpkit.

    Attributes:
        epoch_counter: Has the position of the next iterator.
        global_batch_size: Examples in a batch, over all replicas; None if unknown.
        seed: The seed of the order and the augmentation.
        examples: The examples of the batches: kept, prepared and cached, in the source's order.
    """

    def __init__(
        self,
        epochs: tf.data.Dataset,
        epoch_counter: EpochCounter,
        *,
        global_batch_size: int | None,
        seed: Any,
        examples: tf.data.Dataset,
    ) -> None:
        self.epoch_counter = epoch_counter
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.examples = examples
        self._epochs = epochs
        self._sized = self._with_length()
        super().__init__(self._sized._variant_tensor)

    def tracked(self) -> "TrackedDataset":
        """Return the same batches as a separate dataset for `kdpkit.callbacks.Resume`."""
        settings = ("global_batch_size", "seed", "examples")
        values = {name: getattr(self, name) for name in settings}
        return TrackedDataset(self._epochs, self.epoch_counter, **values)

    @property
    def element_spec(self) -> Any:
        return self._sized.element_spec

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._sized]

    def _with_length(self) -> tf.data.Dataset:
        """Set the cardinality of a complete epoch."""
        length = tf.data.experimental.assert_cardinality(self.epoch_counter.batches)
        return self._epochs.apply(length)


class TrackedDataset(TrainDataset):
    """A `TrainDataset` whose first epoch may start at any of its batches.

    Further stages would begin to count, store or draw again there. So they raise, except for
    `prefetch`, `take`, and the functions that libraries map, such as Keras' for `class_weight`.
    """

    is_tracked = True

    def cardinality(self) -> tf.Tensor:
        """Return the remaining batches, for a loop that asks in every epoch; Keras asks once."""
        return self.epoch_counter.left()

    def _with_length(self) -> tf.data.Dataset:
        """Set the cardinality of a complete epoch, without asserting it.

        `take` of an endless dataset has it, and a choice between datasets counts as endless if one
        of them is. Here the choice is always the first.
        """
        always_first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
        endless = tf.data.Dataset.choose_from_datasets(
            [self._epochs, self._epochs.repeat()], always_first, stop_on_empty_dataset=True
        )
        return endless.take(self.epoch_counter.batches)


def _only_before_track(stage: str) -> Callable[..., tf.data.Dataset]:
    def add(dataset: TrackedDataset, first: Any = None, *args: Any, **settings: Any) -> Any:
        module = str(getattr(first, "__module__", ""))
        if "map" in stage and module.startswith(("kdpkit", "keras", "tensorflow")):
            return getattr(tf.data.Dataset, stage)(dataset, first, *args, **settings)
        return checks.fail(
            f"A resumed run cannot repeat what `{stage}` does after `Resume.track`.",
            remedy="Add this stage before `track`.",
        )

    return add


for _stage in (
    *("batch", "bucket_by_sequence_length", "cache", "concatenate", "enumerate", "filter"),
    *("flat_map", "group_by_window", "interleave", "map", "padded_batch", "ragged_batch"),
    *("rejection_resample", "scan", "shard", "shuffle", "skip", "snapshot", "take_while"),
    *("unbatch", "unique", "window"),
):
    setattr(TrackedDataset, _stage, _only_before_track(_stage))
