"""Datasets that can start at any batch of any epoch."""

import sys
import warnings
from typing import TYPE_CHECKING, Any

import keras

from kdpkit._internal import checks
from kdpkit.checkpoints import Position

if TYPE_CHECKING:
    from kdpkit.pipelines._epochs import TrainDataset


class Tracked:
    """A dataset that can start at any batch.

    Attributes:
        given: The dataset that `fit` trains on.
        full_length: Batches in a complete epoch, None if it never ends: then an epoch is some
            batches after those of the one before, and all are in epoch 0.
        first_epoch: The epoch at which it starts.
        counts_epochs: Whether its epoch follows from calls of Keras alone, and cannot be set.
        global_batch_size: Examples in a batch, None if unknown.
        seed: Seed of the order, None if there is none or it is unknown.
    """

    given: Any
    full_length: int | None
    first_epoch = 0
    counts_epochs = False
    global_batch_size: int | None = None
    seed: Any = None
    _was_used = False

    def is_used(self) -> bool:
        """Return whether any batch was taken since the last `go_to`."""
        return self._was_used

    def first_batch(self) -> Any:
        """Return a batch to build a model for; `go_to` has to follow."""

    def start(self) -> None:
        """Start where it was when tracked: Keras takes up to two batches to build a model."""

    def go_to(self, position: Position) -> None:
        """Start at a position."""

    def begin_epoch(self, epoch: int) -> None:
        """Start at an epoch after the first, also if others have iterated the dataset since."""


def tracked(dataset: Any) -> Tracked:
    """Return a dataset that can start at any batch.

    Raises:
        ValueError: This kind of dataset is not supported, or cannot be read again in its order.
    """
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


class TrackedPipeline(Tracked):
    """A `tf.data` pipeline that keeps its own count of epochs and batches."""

    def __init__(self, dataset: "TrainDataset") -> None:
        self._counter = dataset.epoch_counter
        self._start = Position(*self._counter.position())
        self.first_epoch = self._start.epoch
        self.given = dataset.tracked()
        self.full_length = self._counter.batches if self._counter.batches >= 0 else None
        self.global_batch_size, self.seed = dataset.global_batch_size, dataset.seed

    def is_used(self) -> bool:
        return self._counter.has_given()

    def first_batch(self) -> Any:
        return next(iter(self.given))

    def start(self) -> None:
        self.go_to(self._start)

    def go_to(self, position: Position) -> None:
        self._counter.move(position.epoch, position.step)

    def begin_epoch(self, epoch: int) -> None:
        if self.full_length is not None:
            self._counter.move(epoch, 0)


class TrackedBatches(Tracked, keras.utils.PyDataset):
    def __init__(self, dataset: Any) -> None:
        super().__init__()  # without workers, which keep batches for the next epoch
        if dataset.workers > 1 or dataset.use_multiprocessing:
            warnings.warn(
                f"`Resume` reads this `PyDataset` without workers (workers={dataset.workers}, "
                f"use_multiprocessing={dataset.use_multiprocessing}), whose order it cannot "
                "restore; to read ahead, train on a `tf.data.Dataset` or a Grain dataset.",
                stacklevel=4,
            )
        self._dataset = dataset
        self._skipped = 0
        self.counts_epochs = not hasattr(dataset, "epoch")
        self.first_epoch = int(getattr(dataset, "epoch", 0))
        self._epoch: int | None = None  # that is trained on, once that is known
        self._expected = 0
        self.global_batch_size = getattr(dataset, "global_batch_size", None)
        self.seed = getattr(dataset, "seed", None)

    @property
    def given(self) -> Any:
        return self

    @property
    def full_length(self) -> int | None:  # type: ignore[override]
        return self._dataset.num_batches

    @property
    def num_batches(self) -> int | None:
        """The number of batches left in the epoch; None if it never ends."""
        return None if self.full_length is None else self.full_length - self._skipped

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in (0, self._expected):
            checks.fail(
                "Keras shuffles the batches, in an order that a resumed run cannot restore.",
                remedy="Call `fit` with `shuffle=False`; `ArrayBatches(seed=...)` shuffles.",
            )
        self._expected = index + 1
        self._was_used = True
        return self._dataset[index + self._skipped]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):  # `copy` and `pickle` ask an empty object
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def first_batch(self) -> Any:
        return self._dataset[0]

    def start(self) -> None:
        self._was_used = False
        self.begin_epoch(self.first_epoch)

    def go_to(self, position: Position) -> None:
        changes = type(self._dataset).on_epoch_end is not keras.utils.PyDataset.on_epoch_end
        if self._epoch is None:
            for _ in range(self.first_epoch, position.epoch):
                self._dataset.on_epoch_begin()
                self._dataset.on_epoch_end()
        elif self.counts_epochs and changes:
            checks.fail(
                "This `PyDataset` changes in `on_epoch_end`, and cannot go back to where the saved "
                "state is.",
                dataset=type(self._dataset).__name__,
                remedy="Make it and `Resume` again, or give it an attribute `epoch` to start at.",
            )
        self._skipped, self._was_used = position.step, False
        self.begin_epoch(position.epoch)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if not self.counts_epochs:
            self._dataset.epoch = epoch

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self.full_length is not None:  # else Keras counts on
            self._skipped = 0
        self._dataset.on_epoch_end()
        if self._epoch is not None:  # it is not for validations to advance it
            self.begin_epoch(self._epoch)
