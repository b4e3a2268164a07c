"""What batches a dataset gives, of whatever kind: their parts, and which sizes vary.

Looking changes nothing: a dataset that counts its epochs begins afterwards where it did before.
"""

import copy
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kdpkit import _checks
from kdpkit.batches import rows_of

Shape = tuple[int | None, ...]
_ROWS_OF_KERAS = 32  # in a batch that `fit` cuts from arrays, unless it is told otherwise


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a batch.

    Attributes:
        name: As in `x['token_ids']`.
        shape: With None where batches differ, or nothing says that they do not; None if even the
            number of axes is open.
        dtype: The name of its type.
        is_dense: Whether it is a plain array, neither ragged nor sparse.
    """

    name: str
    shape: Shape | None
    dtype: str
    is_dense: bool = True


@dataclasses.dataclass(frozen=True)
class Batches:
    """What a dataset gives.

    Attributes:
        parts: The arrays of a batch.
        first: The first batch; its arrays say what a step is compiled for.
        rows: Rows of the first batch.
    """

    parts: tuple[Part, ...]
    first: Any
    rows: int


def batches_of(dataset: Any, batch_size: int | None = None) -> Batches:
    """Look at a dataset.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, or arrays.
        batch_size: Rows of the batches that `fit` cuts arrays into; None as in Keras.

    Raises:
        ValueError: It is none of these, is empty, or fails when it is to give its first batch.
    """
    if is_tf_dataset(dataset):
        return _of_tf_data(dataset)
    if isinstance(dataset, keras.utils.PyDataset):
        return _of_py_dataset(dataset)
    leaves = keras.tree.flatten(dataset)
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        _checks.refuse(
            "`dataset` must be a `tf.data.Dataset`, a `keras.utils.PyDataset` such as "
            "`kdpkit.batches.ArrayBatches`, or arrays.",
            dataset=type(dataset).__name__,
        )
    return _of_arrays(dataset, batch_size)


def is_tf_dataset(value: Any) -> bool:
    """Tell whether it is a `tf.data.Dataset`, without loading TensorFlow for it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


def _of_tf_data(dataset: Any) -> Batches:
    first = _first(iter(dataset), dataset)
    parts = tuple(_part(name, spec) for name, spec in _named(dataset.element_spec))
    return Batches(parts, first, _rows(first, parts))


def _part(name: str, spec: Any) -> Part:
    shape = getattr(spec, "shape", None)
    shape = None if shape is None or shape.rank is None else tuple(shape)
    dtype = getattr(getattr(spec, "dtype", None), "name", type(spec).__name__)
    return Part(name, shape, dtype, is_dense=type(spec).__name__ == "TensorSpec")


def _of_py_dataset(dataset: Any) -> Batches:
    dataset = vars(dataset).get("_dataset", dataset)  # what `Resume` tracks
    dataset = copy.copy(dataset)  # which may note that its last batch was taken
    count = dataset.num_batches
    if count == 0:
        _refuse_empty(dataset)
    first = _first(iter([_item(dataset, 0)]), dataset)
    last = first if count in (None, 1) else _item(dataset, count - 1)
    return _differing(first, last)


def _item(dataset: Any, index: int) -> Any:
    try:
        batch = dataset[index]
    except Exception as error:  # a user's dataset may raise anything
        raise _checks.InputError(_failed(error)) from error
    return tuple(batch) if isinstance(batch, list) else batch


def _of_arrays(data: Any, batch_size: int | None) -> Batches:
    size = _checks.integer("batch_size", batch_size or _ROWS_OF_KERAS)
    arrays = keras.tree.map_structure(lambda part: part if part is None else np.asarray(part), data)
    rows = rows_of(arrays)

    def rows_from(start: int) -> Any:
        return keras.tree.map_structure(
            lambda part: part if part is None else part[start : start + size], arrays
        )

    return _differing(rows_from(0), rows_from((rows - 1) // size * size))


def _differing(first: Any, last: Any) -> Batches:
    """Describe batches by the first and the last one."""
    arrays = [(name, np.asarray(part)) for name, part in _named(first)]
    shapes = [np.shape(part) for _, part in _named(last)]
    parts = tuple(
        Part(name, _common(array.shape, shape), _dtype_name(array.dtype))
        for (name, array), shape in zip(arrays, shapes, strict=True)
    )
    return Batches(parts, first, _rows(first, parts))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> Shape | None:
    if len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _dtype_name(dtype: np.dtype) -> str:
    return "string" if dtype.kind in "OSU" else dtype.name


def _first(iterator: Iterator[Any], dataset: Any) -> Any:
    try:
        first = next(iterator, None)
    except Exception as error:  # reading and preparing examples may raise anything
        raise _checks.InputError(_failed(error)) from error
    if first is None:
        _refuse_empty(dataset)
    return first


def _failed(error: Exception) -> str:
    said = f"{error}".strip().split("\n")[0]
    return (
        f"`dataset` fails when it is to give a batch: {type(error).__name__}: {said} Mend that "
        "first; it has nothing to do with a TPU."
    )


def _refuse_empty(dataset: Any) -> None:
    _checks.refuse("`dataset` is empty: it gives no batch.", dataset=type(dataset).__name__)


def _rows(first: Any, parts: tuple[Part, ...]) -> int:
    shapes = [tuple(np.shape(part)) for _, part in _named(first) if hasattr(part, "dtype")]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if 0 in rows or len(rows) > 1:
        _checks.refuse(
            "`dataset` gives single examples, and must give batches.",
            shapes=[part.shape for part in parts],
            remedy="Add `.batch(global_batch_size, drop_remainder=True)`.",
        )
    return int(next(iter(rows), 0))


def _named(batch: Any) -> Iterator[tuple[str, Any]]:
    names = ("x", "y", "sample_weight")
    for name, nest in zip(names, keras.utils.unpack_x_y_sample_weight(batch), strict=True):
        yield from _leaves(name, nest)


def _leaves(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict):
        for key, part in nest.items():
            yield from _leaves(f"{name}[{key!r}]", part)
    elif isinstance(nest, (list, tuple)):
        for index, part in enumerate(nest):
            yield from _leaves(f"{name}[{index}]", part)
    elif nest is not None:
        yield name, nest
