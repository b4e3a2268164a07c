"""Datasets that can start at any batch of any epoch."""

import sys
import warnings
from typing import TYPE_CHECKING, Any

import keras

from kdpkit._internal import checks
from kdpkit.checkpoints import Position

if TYPE_CHECKING:
    from kdpkit.pipelines._epochs import TrainDataset


def tracked(dataset: Any) -> "TrackedPipeline | TrackedBatches":
    """Return data that can start at any batch; raise if their order is not reproducible."""
    kind = type(dataset).__name__
    if isinstance(dataset, TrackedBatches) or hasattr(dataset, "is_tracked"):
        checks.fail("This dataset is tracked already; pass the dataset itself.", dataset=kind)
    if isinstance(dataset, keras.utils.PyDataset):
        return TrackedBatches(dataset)
    if hasattr(dataset, "epoch_counter"):
        return TrackedPipeline(dataset)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset):
        from kdpkit.pipelines import _iterations

        return TrackedPipeline(_iterations.replayed(dataset))
    return checks.fail(
        "`Resume` cannot start at any batch of this. It takes a `tf.data.Dataset`, a "
        "`keras.utils.PyDataset`, and what `kdpkit.pipelines.train_pipeline` returned.",
        dataset=kind,
        remedy="`kdpkit.batches.ArrayBatches` splits arrays into batches, what `from_grain` and "
        "`from_datasets` return, or a `Source` of what has a length and an index.",
    )


class TrackedPipeline:
    """A `tf.data` pipeline that keeps its own count of epochs and batches.

    Attributes:
        dataset: What `fit` trains on.
        batches_per_epoch: Batches in a complete epoch. None if the data never end: an epoch then
            continues after the one before, and all positions are in epoch 0.
        first_epoch: The epoch of the data with which training starts.
        counts_calls: Whether the data count their epochs by Keras' calls, and cannot be moved to an
            epoch.
        global_batch_size: Examples in a batch, None if unknown.
        num_examples: Examples of the data, also if an epoch leaves some out; None if unknown.
        seed: Seed of the order, None if there is none or it is unknown.
    """

    counts_calls = False

    def __init__(self, dataset: "TrainDataset") -> None:
        from kdpkit.pipelines import _iterations

        self._counter = dataset.epoch_counter
        self._start = Position(*self._counter.position())
        self.first_epoch = self._start.epoch
        self.dataset = dataset.tracked()
        self.batches_per_epoch = self._counter.batches if self._counter.batches >= 0 else None
        self.global_batch_size, self.seed = dataset.global_batch_size, dataset.seed
        self.num_examples = _iterations.num_examples(dataset)

    @property
    def was_read(self) -> bool:
        """Whether a batch was read since the last `move_to`."""
        return self._counter.has_given()

    def first_batch(self) -> Any:
        """Return a batch to build a model for; call `move_to` afterwards."""
        return next(iter(self.dataset))

    def start(self) -> None:
        """Move to where `track` found the data: Keras may have read batches to build a model."""
        self.move_to(self._start)

    def move_to(self, position: Position) -> None:
        self._counter.move(position.epoch, position.step)

    def begin_epoch(self, epoch: int) -> None:
        """Move to an epoch after the first, also if others have iterated the dataset since."""
        if self.batches_per_epoch is not None:
            self._counter.move(epoch, 0)


class TrackedBatches(keras.utils.PyDataset):
    """A `PyDataset` that can begin at any batch; its methods are those of `TrackedPipeline`."""

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        super().__init__()  # without workers, which read batches of the next epoch ahead
        if dataset.workers > 1 or dataset.use_multiprocessing:
            warnings.warn(
                f"`Resume` reads this `PyDataset` without workers (workers={dataset.workers}, "
                f"use_multiprocessing={dataset.use_multiprocessing}), whose order it cannot "
                "restore; to read ahead, train on a `tf.data.Dataset` or a Grain dataset.",
                stacklevel=4,
            )
        self.dataset = self
        self.untracked = dataset
        self._skipped = 0
        self.counts_calls = not hasattr(dataset, "epoch")
        self.first_epoch = int(getattr(dataset, "epoch", 0))
        self._epoch: int | None = None  # None before training begins
        self._next_index = 0
        self.was_read = False
        self.global_batch_size = getattr(dataset, "global_batch_size", None)
        self.num_examples = getattr(dataset, "_num_examples", None)
        self.seed = getattr(dataset, "seed", None)

    @property
    def batches_per_epoch(self) -> int | None:
        return self.untracked.num_batches

    @property
    def num_batches(self) -> int | None:
        """The number of batches left in the epoch; None if it never ends."""
        total = self.batches_per_epoch
        return None if total is None else total - self._skipped

    def __len__(self) -> int:
        return len(self.untracked)

    def __getitem__(self, index: int) -> Any:
        if index not in (0, self._next_index):
            checks.fail(
                "Keras shuffles the batches, in an order that a resumed run cannot restore.",
                remedy="Call `fit` with `shuffle=False`; `ArrayBatches(seed=...)` shuffles.",
            )
        self._next_index = index + 1
        self.was_read = True
        return self.untracked[index + self._skipped]

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for special methods before there are attributes.
        if name == "untracked" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.untracked, name)

    def first_batch(self) -> Any:
        return self.untracked[0]

    def start(self) -> None:
        self.was_read = False
        self.begin_epoch(self.first_epoch)

    def move_to(self, position: Position) -> None:
        on_epoch_end = type(self.untracked).on_epoch_end
        if self._epoch is None:
            for _ in range(self.first_epoch, position.epoch):
                self.untracked.on_epoch_begin()
                self.untracked.on_epoch_end()
        elif self.counts_calls and on_epoch_end is not keras.utils.PyDataset.on_epoch_end:
            checks.fail(
                "This `PyDataset` changes in `on_epoch_end`, and cannot go back to where the saved "
                "state is.",
                dataset=type(self.untracked).__name__,
                remedy="Make it and `Resume` again, or give it an attribute `epoch` to start at.",
            )
        self._skipped, self.was_read = position.step, False
        self.begin_epoch(position.epoch)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if not self.counts_calls:
            self.untracked.epoch = epoch

    def on_epoch_begin(self) -> None:
        self.untracked.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self.batches_per_epoch is not None:  # Otherwise Keras keeps counting batches.
            self._skipped = 0
        self.untracked.on_epoch_end()
        if self._epoch is not None:  # A validation on these data must not change their epoch.
            self.begin_epoch(self._epoch)
