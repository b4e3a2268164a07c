"""Datasets that can start at any batch of any epoch, for `Resume`."""

from typing import TYPE_CHECKING, Any

import keras

from kdpkit._internal import checks

if TYPE_CHECKING:
    from kdpkit.pipelines._epochs import TrainDataset


def tracked(dataset: Any) -> "Tracked":
    """Return a dataset that can start at any batch.

    Raises:
        ValueError: This kind of dataset is not supported.
    """
    if isinstance(dataset, TrackedBatches) or hasattr(dataset, "is_tracked"):
        checks.fail(
            "This dataset is tracked already; pass the dataset itself.",
            dataset=type(dataset).__name__,
        )
    if isinstance(dataset, keras.utils.PyDataset):
        return TrackedBatches(dataset)
    if hasattr(dataset, "epoch_counter"):
        return TrackedPipeline(dataset)
    return checks.fail(
        "Only what `kdpkit.pipelines.train_pipeline` returned, as it is, and a "
        "`keras.utils.PyDataset` can start at any of their batches.",
        dataset=type(dataset).__name__,
        remedy="Pass further stages to `train_pipeline` as `prepare` or `augment`; for arrays "
        "there is `kdpkit.batches.ArrayBatches`.",
    )


class TrackedPipeline:
    """A `tf.data` pipeline that keeps its own count of epochs and batches.

    Attributes:
        given: The dataset that `fit` trains on.
        full_length: Batches in a complete epoch, None if unknown.
        global_batch_size: Examples in a batch, None if unknown.
        seed: Seed of the order, None if there is none or it is unknown.
    """

    def __init__(self, dataset: "TrainDataset") -> None:
        self._counter = dataset.epoch_counter
        self._start = self._counter.position()
        self.given = dataset.tracked()
        self.full_length = self._counter.batches
        self.global_batch_size = dataset.global_batch_size
        self.seed = dataset.seed

    @property
    def is_used(self) -> bool:
        """Whether any batch was taken since the last `go_to`."""
        return self._counter.has_given()

    def first_batch(self) -> Any:
        """Return a batch to build a model for."""
        position = self._counter.position()
        batch = next(iter(self.given))
        self.go_to(*position)  # returning the last batch ends the epoch
        return batch

    def start(self) -> None:
        """Start where it was when tracked: Keras may have taken batches to build a model."""
        self.go_to(*self._start)

    def go_to(self, epoch: int, step: int) -> None:
        """Start at a step of an epoch."""
        self._counter.move(epoch, step)


class TrackedBatches(keras.utils.PyDataset):
    """A `PyDataset` that can start at any batch; see `TrackedPipeline` for the attributes."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._skipped = 0
        self._expected = 0
        self.is_used = False
        self.given = self
        self.global_batch_size = getattr(dataset, "global_batch_size", None)
        self.seed = getattr(dataset, "seed", None)

    @property
    def full_length(self) -> int | None:
        return self._dataset.num_batches

    @property
    def num_batches(self) -> int | None:
        """The number of batches left in the epoch."""
        length = self.full_length
        return None if length is None else length - self._skipped

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if self.workers <= 1 and index not in (0, self._expected):
            checks.fail(
                "Keras shuffles the batches, in an order that a resumed run cannot restore.",
                remedy="Call `fit` with `shuffle=False`; `ArrayBatches(seed=...)` shuffles.",
            )
        self._expected = index + 1
        self.is_used = True
        return self._dataset[index + self._skipped]

    def first_batch(self) -> Any:
        """Return a batch to build a model for."""
        return self._dataset[0]

    def start(self) -> None:
        """Start at the current epoch, which is not over if only a part was used."""

    def go_to(self, epoch: int, step: int) -> None:
        """Start at a step of an epoch."""
        self._skipped = step
        if hasattr(self._dataset, "epoch"):
            self._dataset.epoch = epoch
            return
        for _ in range(epoch):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._skipped = 0
        self._dataset.on_epoch_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)


Tracked = TrackedPipeline | TrackedBatches
