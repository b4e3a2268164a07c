"""Datasets that can begin with any batch of any epoch, as `Resume` needs them."""

from typing import Any, Protocol

import keras

from kdpkit import _checks


class Tracked(Protocol):
    """What `Resume` asks of the data.

    Attributes:
        given: What `fit` trains on.
        full_length: Batches in a whole epoch, None if that is unknown.
        is_used: Whether any batch was taken since the last move.
        global_batch_size: Rows in a batch, None if that is unknown.
        seed: Of the order, None if there is none or it is unknown.
    """

    given: Any
    global_batch_size: int | None
    seed: int | None

    @property
    def full_length(self) -> int | None: ...

    @property
    def is_used(self) -> bool: ...

    def first_batch(self) -> Any: ...

    def start(self) -> None: ...

    def go_to(self, epoch: int, step: int) -> None: ...


def tracked(dataset: Any) -> Tracked:
    """Make a dataset able to begin anywhere.

    Raises:
        ValueError: It is of no kind that can.
    """
    if isinstance(dataset, TrackedBatches) or hasattr(dataset, "is_tracked"):
        _checks.refuse(
            "This dataset is tracked already; give `track` the dataset itself.",
            dataset=type(dataset).__name__,
        )
    if isinstance(dataset, keras.utils.PyDataset):
        return TrackedBatches(dataset)
    if hasattr(dataset, "movable"):
        return TrackedPipeline(dataset.movable)
    return _checks.refuse(
        "Only what `kdpkit.pipelines.train_pipeline` gave, as it is, and a "
        "`keras.utils.PyDataset` can begin at any of their batches.",
        dataset=type(dataset).__name__,
        remedy="Give further stages to `train_pipeline` as `prepare` or `augment`; for arrays "
        "there is `kdpkit.batches.ArrayBatches`.",
    )


class TrackedPipeline:
    """A `tf.data` pipeline that keeps its own count of epochs and batches."""

    def __init__(self, movable: Any) -> None:
        self._movable = movable
        self._start = movable.counter.place()
        self.given = movable.dataset.take(-1)  # all of it, as an object of its own
        # For a loop, which asks for every epoch's; Keras takes the first one's for that of all.
        self.given.cardinality = movable.counter.left
        self.given.is_tracked = True
        self.full_length = movable.batches
        self.global_batch_size = movable.global_batch_size
        self.seed = movable.seed

    @property
    def is_used(self) -> bool:
        """Whether any batch was taken since the last move."""
        return self._movable.counter.has_given()

    def first_batch(self) -> Any:
        """Give a batch to build a model for."""
        place = self._movable.counter.place()
        batch = next(iter(self.given))
        self.go_to(*place)  # a last batch that is handed on ends the epoch
        return batch

    def start(self) -> None:
        """Begin where it stood when it was tracked: Keras may have taken batches to build."""
        self.go_to(*self._start)

    def go_to(self, epoch: int, step: int) -> None:
        """Begin with a batch of an epoch."""
        self._movable.counter.move(epoch, step)


class TrackedBatches(keras.utils.PyDataset):
    """Batches by their index."""

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
        """Batches that are left in the epoch."""
        length = self.full_length
        return None if length is None else length - self._skipped

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if self.workers <= 1 and index not in (0, self._expected):
            _checks.refuse(
                "Keras shuffles the batches, in an order that no later run can take up.",
                remedy="Give `fit` `shuffle=False`; `ArrayBatches(seed=...)` shuffles the rows.",
            )
        self._expected = index + 1
        self.is_used = True
        return self._dataset[index + self._skipped]

    def first_batch(self) -> Any:
        """Give a batch to build a model for."""
        return self._dataset[0]

    def start(self) -> None:
        """Begin where it is: an epoch that was not given whole is not over."""

    def go_to(self, epoch: int, step: int) -> None:
        """Begin with a batch of an epoch."""
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
