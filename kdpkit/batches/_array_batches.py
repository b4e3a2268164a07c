"""Splits arrays, or a source of examples, into batches of one size, and pads them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from kdpkit._internal import checks
from kdpkit.batches._sources import Batch, Source

Nest: TypeAlias = Any  # arrays in tuples, lists and dictionaries, as Keras takes them


class ArrayBatches(keras.utils.PyDataset):
    """Splits arrays, or a `Source` of examples, into global batches, in a new order each epoch.

    A batch depends only on the seed, the epoch and its position in the epoch: it is the same on any
    number of devices and processes, and the same again when a run is resumed. An epoch is over once
    its last batch has been returned, since Keras also takes a first batch to build a model. Call
    `fit` with `shuffle=False`, or Keras shuffles the batches again.

    Each of several processes gets its examples of every global batch, in the order of the
    processes, so together they train what one process would; it reads no others.

    Args:
        data: Inputs `x`, `(x, y)` or `(x, y, sample_weight)`, each any nest of arrays with the same
            number of examples. Missing labels may be `None`. Or a `Source`.
        global_batch_size: Examples in a batch, over all devices and processes.
        seed: Fixes the order of every epoch; None keeps the order of the data.
        remainder: `"drop"`, `"pad"` or `"keep"` a smaller last batch; None drops it with the mode
            `"train"`, and keeps it with `"eval"`. On JAX plain Keras raises if the devices do not
            divide a batch; `kdpkit.training` trains and evaluates on it exactly.
        mode: How a padded batch, which repeats its last example with weight 0, is weighted. With
            `"train"` its loss is the mean over its real examples, which weigh `global_batch_size /
            n` each. With `"eval"` all real examples have the same weight, and weights average 1
            over an epoch, so the loss of `evaluate` is the mean over all real examples. Metrics
            have to be in `weighted_metrics`: those in `metrics` count the padding.
        augment: A function of a batch and a `numpy.random.Generator`, a new one for every batch of
            every epoch. It gets the examples of this process.
        steps_per_epoch: Batches in an epoch; None takes all. If fewer, each epoch takes the first
            ones of its order.
        process_count: Number of processes that train together, such as `jax.process_count()`.
        process_index: Index of this process, such as `jax.process_index()`.

    Attributes:
        epoch: The current epoch, from 0; set it to start at another.

    Raises:
        ValueError: Arrays of different lengths or without examples, more than three parts, fewer
            examples than one batch with `"drop"`, too many steps, processes that do not divide
            the batch, no fixed shape or type, text on JAX, or a `Source` that reads other examples
            when it is asked again.

    >>> batches = ArrayBatches((np.arange(5), np.arange(5) % 2), global_batch_size=2)
    >>> len(batches), batches[1]
    (2, (array([2, 3]), array([0, 1])))
    >>> padded = ArrayBatches(np.arange(3), global_batch_size=2, remainder="pad", mode="eval")
    >>> padded[1]
    (array([2, 2]), None, array([1.3333334, 0.       ], dtype=float32))
    """

    def __init__(
        self,
        data: Batch | Source,
        *,
        global_batch_size: int,
        seed: int | None = None,
        remainder: str | None = None,
        mode: str = "train",
        augment: Callable[[Batch, np.random.Generator], Batch] | None = None,
        steps_per_epoch: int | None = None,
        process_count: int = 1,
        process_index: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(data, Source):
            arrays = _as_batch(data)
            data = Source(num_examples(arrays), functools.partial(_select, arrays))
        self._source = data
        self.global_batch_size = checks.integer("global_batch_size", global_batch_size)
        self.seed = seed if seed is None else checks.integer("seed", seed, minimum=0)
        self.mode = checks.one_of("mode", mode, ("train", "eval"))
        remainder = remainder or {"train": "drop", "eval": "keep"}[self.mode]
        self.remainder = checks.one_of("remainder", remainder, ("drop", "pad", "keep"))
        self.augment = augment
        self.process_count = checks.integer("process_count", process_count)
        self.process_index = checks.integer("process_index", process_index, minimum=0)
        self.epoch = 0
        self._was_completed = False  # whether the last batch of the epoch was returned
        self._num_examples = checks.integer("examples", self._source.examples)
        if self._source.has_order and seed is not None:
            checks.fail(
                "These data have an order of their own.",
                seed=seed,
                remedy="Leave `seed` out, and shuffle where they are made, as `shuffle` of Grain.",
            )
        self._check_processes()
        self.steps_per_epoch = self._epoch_length(steps_per_epoch)
        self._kinds = _kinds_of(_first_example(self._source))

    @property
    def examples(self) -> int:
        """Examples in an epoch, over all processes, without padding."""
        return min(self._num_examples, self.steps_per_epoch * self.global_batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __getitem__(self, index: int) -> Batch:
        """Return this process's examples of a batch of the current epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} in an epoch of {len(self)}.")
        self._was_completed |= index == len(self) - 1
        first = index * self.global_batch_size
        count = self._num_examples
        start = self.epoch * count if self._source.has_order else 0
        order: range | np.ndarray = range(start, start + count)
        if self.seed is not None:
            order = _permutation(count, self.seed, self.epoch)
        indices = np.asarray(order[first : first + self.global_batch_size])
        batch = self._padded(indices) if self.remainder == "pad" else self._read(indices)
        if self.augment is not None:
            position = (self.seed or 0, self.epoch, index, self.process_index)
            batch = self.augment(batch, np.random.default_rng(position))
        # Keras cannot make a `tf.TypeSpec` of a list, nor of an array of texts.
        return keras.tree.map_structure(_text_as_tensor, keras.tree.lists_to_tuples(batch))

    def on_epoch_end(self) -> None:
        """Advance to the next epoch and its order, if this epoch was returned completely."""
        self.epoch += self._was_completed
        self._was_completed = False

    def _read(self, batch_indices: np.ndarray) -> Batch:
        indices = self._part_of_process(batch_indices)
        batch = _as_batch(self._source.read(indices))
        kinds, count = _kinds_of(batch), num_examples(batch)
        if count != len(indices):
            checks.fail(
                "`read` of a `Source` must return as many examples as it is given indices.",
                indices=len(indices),
                examples=count,
            )
        if kinds != self._kinds:
            checks.fail(
                "Every example must have the shape and the type of the first one.",
                first=self._kinds,
                later=kinds,
                remedy="Convert, pad or cut the examples before they are split into batches.",
            )
        return batch

    def _padded(self, indices: np.ndarray) -> Batch:
        size, count = self.global_batch_size, len(indices)
        weight = size / count if self.mode == "train" else len(self) * size / self.examples
        weights = np.where(np.arange(size) < count, weight, 0.0)
        padded = indices[np.minimum(np.arange(size), count - 1)]
        return _with_weights(self._read(padded), self._part_of_process(weights))

    def _part_of_process(self, values: np.ndarray) -> np.ndarray:
        count = len(values) // self.process_count
        return values[self.process_index * count :][:count]

    def _epoch_length(self, steps_per_epoch: int | None) -> int:
        rounded = math.floor if self.remainder == "drop" else math.ceil
        available = rounded(self._num_examples / self.global_batch_size)
        if available == 0:
            checks.fail(
                "The data has fewer examples than a batch, so nothing is left when the "
                "remainder is dropped.",
                examples=self._num_examples,
                global_batch_size=self.global_batch_size,
                remedy='Use smaller batches, or `remainder="pad"`.',
            )
        return checks.steps_per_epoch(steps_per_epoch, available)

    def _check_processes(self) -> None:
        count = self.process_count
        if self.process_index >= count:
            checks.fail(
                "`process_index` must be less than `process_count`; the first process is 0.",
                process_index=self.process_index,
                process_count=count,
            )
        uneven = self.global_batch_size % count or (
            self.remainder == "keep" and self._num_examples % self.global_batch_size % count
        )
        if uneven:
            checks.fail(
                "Every process must get the same number of examples of every batch.",
                examples=self._num_examples,
                global_batch_size=self.global_batch_size,
                process_count=count,
                remedy='Use a multiple of the processes, and `remainder="pad"` or `"drop"`.',
            )


def num_examples(batch: Nest) -> int:
    """Return the number of examples in a batch; raise if it differs between its arrays.

    >>> num_examples((np.zeros((3, 2)), {"label": np.zeros(3)}))
    3
    """
    leaves = (leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    shapes = [tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf) for leaf in leaves]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        checks.fail(
            "All arrays of a batch must have the same number of examples, at least one.",
            shapes=shapes if len(shapes) < 9 else [*shapes[:8], "..."],
            remedy="The examples lie along the first axis; convert other values with `np.asarray`.",
        )
    return counts.pop()


def _first_example(source: Source) -> Batch:
    """Return an example, and check that it is the same when it is read again."""
    first, again = (_as_batch(source.read(np.array([0]))) for _ in range(2))
    _kinds_of(first)  # raises for what cannot be compared
    for array, other in zip(*map(keras.tree.flatten, (first, again)), strict=True):
        is_float = array is not None and array.dtype.kind in "fc"
        if not np.array_equal(array, other, equal_nan=is_float):
            checks.fail(
                "An example is another one each time that it is read, so no order of the data is "
                "reproducible.",
                first=array,
                again=other,
                remedy="Draw random numbers in `augment`, or in Grain's `random_map(seed=...)`.",
            )
    return first


def _kinds_of(batch: Batch) -> dict[str, Any]:
    """Return the shape and type of an example by the name of each part; raise if it has none."""
    kinds = {}
    for name, leaf in named_leaves(keras.utils.unpack_x_y_sample_weight(batch)):
        kind = leaf.dtype.kind
        is_text = kind in "SU" or (
            kind == "O" and leaf.size and all(isinstance(x, str | bytes) for x in leaf.flat)
        )
        if not (kind in "biufcV" or (is_text and keras.backend.backend() == "tensorflow")):
            checks.fail(
                "The data have a part that is no array of numbers of one shape.",
                part=name,
                example=np.ravel(leaf)[:1].tolist(),
                remedy="Look text up as numbers (on TensorFlow layers take it as it is), pad, cut "
                "or resize what differs in shape, and flatten what is nested.",
            )
        kinds[name] = leaf.shape[1:], kind
    return kinds


def named_leaves(batch: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a batch, or their specifications, with names such as `x['ids']`."""
    batch = batch if isinstance(batch, tuple) else (batch,)
    names = ("x", "y", "sample_weight", *map(str, range(len(batch))))
    return [
        (names[path[0]] + "".join(f"[{key!r}]" for key in path[1:]), leaf)
        for path, leaf in keras.tree.flatten_with_path(batch)
        if leaf is not None and type(leaf).__name__ != "NoneTensorSpec"  # of `tf.data`
    ]


def _as_batch(data: Batch) -> Batch:
    """Convert the leaves to arrays, and check the number of parts."""
    keras.utils.unpack_x_y_sample_weight(data)
    return _as_arrays(data)


def _as_arrays(nest: Nest) -> Nest:
    """Convert the leaves to arrays; a list is a nest if it contains arrays, else an array."""
    if isinstance(nest, list) and not any(hasattr(part, "shape") for part in nest):
        try:
            return np.asarray(nest)
        except ValueError as error:
            checks.fail(
                "The examples of an array must have one shape.",
                first=nest[0],
                error=checks.first_line(error),
                remedy="Pad or cut them to one shape first.",
            )
    if isinstance(nest, list | tuple):
        return type(nest)(map(_as_arrays, nest))
    if isinstance(nest, dict):
        return {name: _as_arrays(part) for name, part in nest.items()}
    if hasattr(nest, "__getitem__") and not (
        hasattr(nest, "__array__") or isinstance(nest, Sequence)
    ):
        checks.fail(
            "These are no arrays.",
            data=type(nest).__name__,
            remedy="Pass datasets as `from_datasets(...)` or `from_grain(...)`.",
        )
    return nest if nest is None else np.asarray(nest)


def _text_as_tensor(array: Any) -> Any:
    is_text = isinstance(array, np.ndarray) and array.dtype.kind in "OSU"
    return keras.ops.convert_to_tensor(array) if is_text else array


def _select(nest: Nest, indices: np.ndarray) -> Nest:
    return keras.tree.map_structure(lambda part: part if part is None else part[indices], nest)


def _with_weights(batch: Batch, weights: np.ndarray) -> Batch:
    """Multiply the weight of each example, 1 where there is none, by `weights`."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    factor = np.asarray(weights, "float32")
    if weight is None:
        return x, y, factor

    def times(part: np.ndarray) -> np.ndarray:
        kind = part.dtype if part.dtype.kind == "f" else factor.dtype
        return part.astype(kind) * factor.reshape(-1, *[1] * (part.ndim - 1)).astype(kind)

    return x, y, keras.tree.map_structure(times, weight)


@functools.lru_cache(maxsize=4)  # all batches of an epoch share it
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_examples)
