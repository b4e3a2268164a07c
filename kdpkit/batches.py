"""Batches of numpy arrays by the rules of `kdpkit.pipelines`, where there is no TensorFlow.

`ArrayBatches` is a `keras.utils.PyDataset`, so `fit`, `evaluate` and `TrainingLoop` take it on
every backend. `pad_batch` fills a single batch, and is what a Grain dataset maps over its own.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import _checks, scaling

_REMAINDERS = ("drop", "pad", "keep")


class ArrayBatches(keras.utils.PyDataset):
    """Cuts arrays into global batches, every epoch in an order of its own.

    A batch is a function of the seed, the epoch and its place in it alone: the same on any number
    of devices and processes, and drawn again when a run that stopped goes on. An epoch is over when
    its last batch was handed out: Keras takes the first one, too, to build a model. Give `fit`
    `shuffle=False`, or Keras shuffles the batches once more, in an order of its own.

    With several processes each gets its rows of every global batch, in the order of the processes,
    so that together they train what one process would.

    Args:
        data: Inputs `x`, `(x, y)` or `(x, y, sample_weight)`, each any nest of arrays with equally
            many rows. `None` may stand for labels that are not there.
        global_batch_size: Rows of a batch, over all devices and processes.
        seed: Fixes the order of every epoch; None keeps the order that the rows have.
        remainder: `"drop"`, `"pad"` or `"keep"` a smaller last batch. Plain Keras refuses on JAX a
            batch that the devices do not divide; `kdpkit.training` trains on it exactly.
        mode: How a padded batch is weighted. `"train"`: so that its loss is the mean over its real
            rows (see `kdpkit.scaling.padded_rows`). `"eval"`: all real rows alike, with weights
            that average 1 over an epoch, so that the loss of Keras' `evaluate` is the mean over
            all real rows; use `weighted_metrics`.
        augment: A function of a batch and a `numpy.random.Generator`, which is drawn afresh for
            every batch of every epoch. It sees the rows of this process.
        steps_per_epoch: Batches in an epoch; None takes all there are. With fewer, each epoch gives
            the first of its own order.
        process_count: Processes that train together, as `jax.process_count()` gives.
        process_index: Which of them this is, as `jax.process_index()` gives.
        initial_epoch: The epoch to begin with.

    Raises:
        ValueError: Arrays of different lengths or without rows, more than three parts, less than a
            batch to drop, more steps than there are, or processes that do not divide the batch.

    >>> batches = ArrayBatches((np.arange(5), np.arange(5) % 2), global_batch_size=2)
    >>> len(batches), batches[1]
    (2, (array([2, 3]), array([0, 1])))
    >>> padded = ArrayBatches(np.arange(3), global_batch_size=2, remainder="pad", mode="eval")
    >>> padded[1]
    (array([2, 2]), None, array([1.3333334, 0.       ], dtype=float32))
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch_size: int,
        seed: int | None = None,
        remainder: str = "drop",
        mode: str = "train",
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        steps_per_epoch: int | None = None,
        process_count: int = 1,
        process_index: int = 0,
        initial_epoch: int = 0,
    ) -> None:
        super().__init__()
        self.data = _as_batch(data)
        self.global_batch_size = _checks.integer("global_batch_size", global_batch_size)
        self.seed = seed if seed is None else _checks.integer("seed", seed, minimum=0)
        self.remainder = _checks.one_of("remainder", remainder, _REMAINDERS)
        self.mode = _checks.one_of("mode", mode, ("train", "eval"))
        if augment is not None and not callable(augment):
            _checks.refuse(
                "`augment` must be a function of a batch and a `numpy.random.Generator`.",
                augment=augment,
            )
        self.augment = augment
        self.process_count = _checks.integer("process_count", process_count)
        self.process_index = _checks.integer("process_index", process_index, minimum=0)
        self.epoch = _checks.integer("initial_epoch", initial_epoch, minimum=0)
        self._is_given = False  # the whole epoch
        self._rows = rows_of(self.data)
        self._check_processes()
        self.steps_per_epoch = self._length(steps_per_epoch)

    @property
    def examples(self) -> int:
        """Rows that an epoch gives, over all processes, filling not counted."""
        return min(self._rows, self.steps_per_epoch * self.global_batch_size)

    def __len__(self) -> int:
        """Give the batches in an epoch."""
        return self.steps_per_epoch

    def __getitem__(self, index: int) -> Any:
        """Give a batch of the epoch at hand: this process's rows of it."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} in an epoch of {len(self)}.")
        self._is_given |= index == len(self) - 1
        first = index * self.global_batch_size
        rows = self._order(self.epoch)[first : first + self.global_batch_size]
        batch = self._padded(rows) if self.remainder == "pad" else _taken(self.data, rows)
        batch = keras.tree.map_structure(self._of_process, batch)
        if self.augment is None:
            return batch
        return self.augment(batch, self._generator(self.epoch, index, self.process_index))

    def on_epoch_end(self) -> None:
        """Go on to the next epoch, which has another order, if this one was given."""
        self.epoch += self._is_given
        self._is_given = False

    def _padded(self, rows: np.ndarray) -> Any:
        size = self.global_batch_size
        source, shares = scaling.padded_rows(len(rows), size, mode=self.mode)
        given = len(self) * size / self.examples if self.mode == "eval" else 1.0
        return _weighted(_taken(self.data, rows[[*source]]), [given * share for share in shares])

    def _order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self._rows)
        return _permutation(self._rows, self.seed, epoch)

    def _generator(self, *place: int) -> np.random.Generator:
        return np.random.default_rng([self.seed or 0, *place])

    def _of_process(self, part: Any) -> Any:
        if self.process_count == 1 or part is None:
            return part
        rows = len(part) // self.process_count
        return part[self.process_index * rows :][:rows]

    def _length(self, wanted: int | None) -> int:
        cut = math.floor if self.remainder == "drop" else math.ceil
        available = cut(self._rows / self.global_batch_size)
        if available == 0:
            _checks.refuse(
                "There is less than a batch, so nothing is left when the remainder is dropped.",
                rows=self._rows,
                global_batch_size=self.global_batch_size,
                remedy='Use smaller batches, or `remainder="pad"`.',
            )
        steps = available if wanted is None else _checks.integer("steps_per_epoch", wanted)
        if steps > available:
            _checks.refuse(
                f"An epoch cannot have more batches than the data gives, which is {available}.",
                steps_per_epoch=steps,
                remedy="Train for more epochs instead.",
            )
        return steps

    def _check_processes(self) -> None:
        count = self.process_count
        if self.process_index >= count:
            _checks.refuse(
                "`process_index` must be less than `process_count`; the first process is 0.",
                process_index=self.process_index,
                process_count=count,
            )
        uneven = self.global_batch_size % count or (
            self.remainder == "keep" and self._rows % self.global_batch_size % count
        )
        if uneven:
            _checks.refuse(
                "Every process must get the same number of rows of every batch.",
                rows=self._rows,
                global_batch_size=self.global_batch_size,
                process_count=count,
                remedy='Use a multiple of the processes, and `remainder="pad"` or `"drop"`.',
            )


def pad_batch(batch: Any, global_batch_size: int, *, mode: str = "train") -> Any:
    """Fill a batch of numpy arrays up to a number of rows; `pad_to_global_batch` without tf.data.

    Where rows of a batch interact, as in training with BatchNormalization, filling is not exact.

    Args:
        batch: Inputs `x`, `(x, y)`, or `(x, y, sample_weight)`, each any nest of arrays.
        global_batch_size: The rows that come out.
        mode: `"train"` or `"eval"`, as in `kdpkit.scaling.padded_rows`.

    Returns:
        `(x, y, sample_weight)`, with `y` None if there was none. Weights that were there are
        multiplied.

    Raises:
        ValueError: There are more rows than that, or none.

    >>> x, _, weight = pad_batch(np.array([5.0, 6.0]), 4)
    >>> x.tolist(), weight.tolist()
    ([5.0, 6.0, 6.0, 6.0], [2.0, 2.0, 0.0, 0.0])
    """
    batch = _as_batch(batch)
    source, shares = scaling.padded_rows(rows_of(batch), global_batch_size, mode=mode)
    return _weighted(_taken(batch, [*source]), shares)


def rows_of(batch: Any) -> int:
    """Give the rows of a batch, the same in all its arrays.

    Raises:
        ValueError: They differ, or there are none.

    >>> rows_of((np.zeros((3, 2)), {"label": np.zeros(3)}))
    3
    """
    leaves = (leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    shapes = [tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf) for leaf in leaves]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or 0 in rows:
        _checks.refuse(
            "All arrays of a batch must have the same rows, at least one, along the first axis.",
            shapes=shapes if len(shapes) < 9 else [*shapes[:8], "..."],
            remedy="Make arrays of what is none yet, with `np.asarray`.",
        )
    return rows.pop()


def _as_batch(data: Any) -> Any:
    """Make arrays of the leaves, and see that there are as many parts as Keras takes."""
    keras.utils.unpack_x_y_sample_weight(data)
    return _as_arrays(data)


def _as_arrays(nest: Any) -> Any:
    """Make arrays of the leaves; a list is a nest if it holds arrays, and else an array."""
    if isinstance(nest, list) and not any(hasattr(part, "shape") for part in nest):
        return np.asarray(nest)
    if isinstance(nest, list | tuple):
        return type(nest)(map(_as_arrays, nest))
    if isinstance(nest, dict):
        return {name: _as_arrays(part) for name, part in nest.items()}
    return nest if nest is None else np.asarray(nest)


def _taken(nest: Any, rows: Sequence[int] | np.ndarray) -> Any:
    return keras.tree.map_structure(lambda part: part if part is None else part[rows], nest)


def _weighted(batch: Any, shares: Sequence[float]) -> tuple[Any, Any, Any]:
    """Weight each row by its share, whatever the weights that are there already."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    share = np.asarray(shares, "float32")
    if weight is None:
        return x, y, share

    def times(part: Any) -> Any:
        kind = part.dtype if part.dtype.kind == "f" else share.dtype
        return part.astype(kind) * share.reshape(-1, *[1] * (part.ndim - 1)).astype(kind)

    return x, y, keras.tree.map_structure(times, weight)


@functools.lru_cache(maxsize=4)  # an epoch asks for it with every batch
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
