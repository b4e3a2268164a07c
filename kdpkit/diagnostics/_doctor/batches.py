"""The batches of a dataset of any kind: their parts, and which sizes vary.

A dataset that counts its epochs begins afterwards where it did before, except for
`tf.data.Dataset.shuffle`.
"""

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.batches._array_batches import named_leaves, num_examples
from kdpkit.callbacks._resume.data import TrackedBatches

_BATCH_SIZE_OF_KERAS = 32  # of arrays in `fit`
_BATCHES_OF_SAME = 1000  # in an epoch of one batch that is given again and again


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of all batches."""

    name: str  # as in `x['token_ids']`
    shape: tuple[int | None, ...] | None  # None where batches may differ
    dtype: str  # or "string", or "object" for other objects of Python
    is_dense: bool  # neither ragged nor sparse


@dataclasses.dataclass(frozen=True)
class Batches:
    """What the batches of a dataset are, and the first of them with its number of examples."""

    parts: tuple[Part, ...]
    first: Any
    examples: int

    @property
    def are_dense(self) -> bool:
        return all(part.is_dense for part in self.parts)


def batches_of(dataset: Any, batch_size: int | None = None, *, name: str = "dataset") -> Batches:
    """Look at the first batch of a dataset or of arrays, and at what shows if others differ."""
    size = _BATCH_SIZE_OF_KERAS if batch_size is None else checks.integer("batch_size", batch_size)
    try:
        ends = _ends(dataset, size)
    except Exception as error:  # reading and preparing examples may raise anything
        raise errors.InputError(
            f"`{name}` raises before its first batch: {checks.reason_of(error)}. Fix that first: "
            "training would fail in the same way."
        ) from error
    received = {name: type(dataset).__name__}
    if ends is None:
        checks.fail(
            f"`{name}` must be a `tf.data.Dataset`, a `keras.utils.PyDataset` such as "
            "`kdpkit.batches.ArrayBatches`, a Grain dataset, or arrays; a generator yields each "
            "batch once, and a check would use one up.",
            **received,
        )
    first, other = (tuple(end) if isinstance(end, list) else end for end in ends)
    if first is None:
        checks.fail(f"`{name}` is empty: it has no batch.", **received)
    leaves, others = named_leaves(first), [leaf for _, leaf in named_leaves(other)]
    sizes = {(_shape(leaf) or ())[:1] for _, leaf in leaves}
    is_known = not isinstance(first, tuple) or len(first) <= 3
    if not is_known or len(sizes) != 1 or () in sizes or len(leaves) != len(others):
        checks.fail(
            f"`{name}` must have batches of arrays `x`, `(x, y)` or `(x, y, sample_weight)`, and "
            "has single examples, lists, or other parts.",
            **received,
            remedy="Add `.batch(global_batch_size, drop_remainder=True)`, or make arrays with "
            "`np.asarray`.",
        )
    parts = (_part(*leaf, other) for leaf, other in zip(leaves, others, strict=True))
    ((examples,),) = sizes
    return Batches(tuple(parts), first, int(examples or 0))


class _SameBatch(keras.utils.PyDataset):
    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def __len__(self) -> int:
        return _BATCHES_OF_SAME

    def __getitem__(self, index: int) -> Any:
        return self._batch


def repeated(batch: Any) -> Any:
    """Return a dataset of one batch in memory, again and again, with no other work to do."""
    batch = keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(batch))
    if keras.backend.backend() == "jax":
        return _SameBatch(as_arrays(batch))
    import tensorflow as tf

    from kdpkit._internal.datasets import untuned

    return untuned(tf.data.Dataset.from_tensors(batch).repeat())


def are_arrays(data: Any) -> bool:
    parts = [part for part in keras.tree.flatten(data) if part is not None]
    return bool(parts) and all(hasattr(part, "__array__") for part in parts)


def as_arrays(nest: Any, begin: int = 0, end: int | None = None) -> Any:
    """Return the examples from `begin` to `end` as arrays of NumPy.

    >>> as_arrays((np.zeros((10, 3)), None), 0, 8)[0].shape
    (8, 3)
    """
    return keras.tree.map_structure(
        lambda part: part if part is None else np.asarray(part)[begin:end], nest
    )


def untracked(dataset: Any) -> Any:
    """Return what `Resume.track` was called with: what that returns is read in one order only."""
    return dataset.untracked if isinstance(dataset, TrackedBatches) else dataset


def is_tf_dataset(value: Any) -> bool:
    """Return whether it is a `tf.data.Dataset`, without loading TensorFlow for it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


def _ends(dataset: Any, size: int) -> tuple[Any, Any] | None:
    """Return the first batch, None without one, and the last or the specification of all."""
    if isinstance(dataset, keras.utils.PyDataset):
        dataset = copy.copy(untracked(dataset))  # which may count what is taken
        count = dataset.num_batches
        first = None if count == 0 else dataset[0]
        return first, dataset[count - 1] if count and count > 1 else first
    if are_arrays(dataset):
        last = (num_examples(dataset) - 1) // size * size
        return as_arrays(dataset, 0, size), as_arrays(dataset, last, last + size)
    if isinstance(dataset, str | Iterator) or not isinstance(dataset, Iterable):
        return None
    first = next(iter(dataset), None)  # also of Grain's datasets, and of PyTorch's `DataLoader`
    return first, getattr(dataset, "element_spec", first)


def _shape(array: Any) -> tuple[int | None, ...] | None:
    shape = array.shape if hasattr(array, "shape") else np.shape(array)
    return None if getattr(shape, "rank", 0) is None else tuple(shape)  # of TensorFlow


def _part(name: str, array: Any, other: Any) -> Part:
    """Describe a part of all batches by that of the first, and by another or its specification."""
    shape, others = _shape(array) or (), _shape(other)
    common = None
    if others is not None and len(shape) == len(others):
        common = tuple(a if a == b else None for a, b in zip(shape, others, strict=True))
    if hasattr(array, "shape") and not hasattr(array, "__array__"):  # ragged or sparse
        return Part(name, common, getattr(array.dtype, "name", ""), is_dense=False)
    array = np.asarray(array)
    if array.dtype.kind == "O" and not any(isinstance(v, str | bytes) for v in array.flat):
        return Part(name, common, "object", is_dense=False)
    return Part(name, common, "string" if array.dtype.kind in "OSU" else array.dtype.name, True)
