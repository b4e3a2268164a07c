"""What batches a dataset gives, of whatever kind: their parts, and which sizes vary.

Looking changes nothing: a dataset that counts its epochs begins afterwards where it did before, and
Python's and NumPy's random numbers go on where they were. One thing cannot be kept: the shuffles of
a `tf.data.Dataset.shuffle` that shuffles each iteration anew, which counts this one too.
"""

import contextlib
import copy
import dataclasses
import math
import random
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np

from kdpkit import _checks
from kdpkit.batches import ArrayBatches, rows_of

Shape = tuple[int | None, ...]
_ROWS_OF_KERAS = 32  # in a batch that `fit` cuts from arrays, unless it is told otherwise
_LOADERS = ("MapDataset", "IterDataset", "DataLoader")  # of Grain and PyTorch, which `fit` takes
_SHOWN = 4  # names in a sentence


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a batch.

    Attributes:
        name: As in `x['token_ids']`.
        shape: With None where batches differ, or nothing says that they do not; None if even the
            number of axes is open.
        dtype: The name of its type; `"object"` for Python objects, such as rows of any length.
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
        looked_at: Which batches that was taken from; None where it holds for all.
    """

    parts: tuple[Part, ...]
    first: Any
    rows: int
    looked_at: str | None = None


def batches_of(dataset: Any, batch_size: int | None = None, *, name: str = "dataset") -> Batches:
    """Look at a dataset.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain dataset, a PyTorch
            `DataLoader`, or arrays.
        batch_size: Rows of the batches that `fit` cuts arrays into; None as in Keras.
        name: Of the argument.

    Raises:
        ValueError: It is none of these, is empty, or fails when it is to give its first batch.
    """
    size = _ROWS_OF_KERAS if batch_size is None else _checks.integer("batch_size", batch_size)
    with random_numbers_kept(), _naming(name):
        if is_tf_dataset(dataset):
            return _of_tf_data(dataset)
        if isinstance(dataset, keras.utils.PyDataset):
            return _of_py_dataset(dataset)
        if _is_loader(dataset):
            return _of_loader(dataset)
        leaves = keras.tree.flatten(dataset)
        if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
            _checks.refuse(
                "`dataset` must be a `tf.data.Dataset`, a `keras.utils.PyDataset` such as "
                "`kdpkit.batches.ArrayBatches`, a Grain dataset, or arrays.",
                dataset=type(dataset).__name__,
            )
        return _of_arrays(dataset, size)


def is_generator(value: Any) -> bool:
    """Tell whether it is a Python generator, which gives each batch once."""
    return isinstance(value, types.GeneratorType)


def are_arrays(data: Any) -> bool:
    """Tell whether `fit` cuts it into batches itself."""
    parts = [part for part in keras.tree.flatten(data) if part is not None]
    return bool(parts) and all(hasattr(part, "__array__") for part in parts)


def split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Cut arrays as Keras does for `validation_split`: the last rows are held out.

    >>> [part.shape for part in split(np.zeros((10, 3)), 0.2)]
    [(8, 3), (2, 3)]
    """
    first = math.floor(rows_of(arrays) * (1 - fraction))

    def rows(wanted: slice) -> Any:
        return keras.tree.map_structure(
            lambda part: part if part is None else np.asarray(part)[wanted], arrays
        )

    return rows(slice(first)), rows(slice(first, None))


def is_tf_dataset(value: Any) -> bool:
    """Tell whether it is a `tf.data.Dataset`, without loading TensorFlow for it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let Python's and NumPy's random numbers go on where they were."""
    states = random.getstate(), np.random.get_state()  # a dataset may draw from them
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let sentences about `dataset` name the argument that it came as."""
    try:
        yield
    except _checks.InputError as error:
        if name == "dataset":
            raise
        said = str(error).replace("`dataset`", f"`{name}`").replace("dataset=", f"{name}=")
        raise _checks.InputError(said) from error


def _is_loader(value: Any) -> bool:
    """Tell whether it is a Grain dataset or a PyTorch `DataLoader`, without loading these."""
    return any(
        parent.__name__ in _LOADERS and parent.__module__.split(".")[0] in ("grain", "torch")
        for parent in type(value).__mro__
    )


def _of_tf_data(dataset: Any) -> Batches:
    specs = [*_named(dataset.element_spec)]
    first = _first(iter(dataset), dataset)
    parts = tuple(_part(name, spec) for name, spec in specs)
    return Batches(parts, first, _rows(first, parts))


def _part(name: str, spec: Any) -> Part:
    shape = getattr(spec, "shape", None)
    shape = None if shape is None or shape.rank is None else tuple(shape)
    dtype = getattr(getattr(spec, "dtype", None), "name", type(spec).__name__)
    return Part(name, shape, dtype, is_dense=type(spec).__name__ == "TensorSpec")


def _of_py_dataset(dataset: Any) -> Batches:
    dataset = vars(dataset).get("_dataset", dataset)  # what `Resume` tracks
    dataset = copy.copy(dataset)  # which may note that its last batch was taken
    try:
        count = dataset.num_batches
    except NotImplementedError:  # raised by the property that a subclass without a length inherits
        _checks.refuse(
            "`dataset` does not say how many batches it has, and `fit` asks.",
            dataset=type(dataset).__name__,
            remedy="Give it `__len__`, or the property `num_batches`, which is None if it is "
            "endless.",
        )
    if count == 0:
        _refuse_empty(dataset)
    first = _first(iter([_item(dataset, 0)]), dataset)
    last = first if count in (None, 1) else _item(dataset, count - 1)
    batches = _differing(first, last)
    is_uniform = isinstance(dataset, ArrayBatches) and dataset.augment is None
    if is_uniform or (count is not None and count <= 2):  # both are known
        return batches
    looked_at = "the first batch" if count is None else f"the first and the last of {count} batches"
    return dataclasses.replace(batches, looked_at=looked_at)


def _of_loader(dataset: Any) -> Batches:
    first = _first(iter(dataset), dataset)
    first = _as_tuple(first)
    return dataclasses.replace(_differing(first, first), looked_at="the first batch")


def _item(dataset: Any, index: int) -> Any:
    try:
        batch = dataset[index]
    except Exception as error:  # a user's dataset may raise anything
        raise _checks.InputError(_failed(error)) from error
    return _as_tuple(batch)


def _as_tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch


def _of_arrays(data: Any, size: int) -> Batches:
    arrays = keras.tree.map_structure(lambda part: part if part is None else np.asarray(part), data)
    rows = rows_of(arrays)

    def rows_from(start: int) -> Any:
        return keras.tree.map_structure(
            lambda part: part if part is None else part[start : start + size], arrays
        )

    return _differing(rows_from(0), rows_from((rows - 1) // size * size))


def _differing(first: Any, last: Any) -> Batches:
    """Describe batches by the first and the last one."""
    arrays, others = [*_named(first)], [*_named(last)]
    if [name for name, _ in arrays] != [name for name, _ in others]:
        _checks.refuse(
            "`dataset` gives batches of different parts.",
            first=[name for name, _ in arrays[:_SHOWN]],
            last=[name for name, _ in others[:_SHOWN]],
            remedy="All must have those of the first.",
        )
    numbers = [name for name, part in arrays if not hasattr(part, "shape")]
    if numbers:
        _checks.refuse(
            "`dataset` gives lists of Python's numbers or other objects, and must give arrays.",
            parts=[*numbers[:_SHOWN], *["..."] * (len(numbers) > _SHOWN)],
            remedy="Make them with `np.asarray`.",
        )
    parts = tuple(
        _part_of(name, array, other)
        for (name, array), (_, other) in zip(arrays, others, strict=True)
    )
    return Batches(parts, first, _rows(first, parts))


def _part_of(name: str, array: Any, other: Any) -> Part:
    shape = _common(tuple(array.shape), tuple(other.shape))
    if not hasattr(array, "__array__"):  # sparse, of TensorFlow or SciPy
        return Part(name, shape, getattr(array.dtype, "name", ""), is_dense=False)
    array = np.asarray(array)
    if array.dtype.kind == "O" and not any(isinstance(v, str | bytes) for v in array.flat):
        return Part(name, shape, "object", is_dense=False)
    return Part(name, shape, "string" if array.dtype.kind in "OSU" else array.dtype.name)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> Shape | None:
    if len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


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
        "first: training would fail in the same way."
    )


def _refuse_empty(dataset: Any) -> NoReturn:
    _checks.refuse("`dataset` is empty: it gives no batch.", dataset=type(dataset).__name__)


def _rows(first: Any, parts: tuple[Part, ...]) -> int:
    shapes = [tuple(part.shape) for _, part in _named(first) if hasattr(part, "dtype")]
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
    if isinstance(batch, list | tuple) and not 1 <= len(batch) <= len(names):
        _checks.refuse(
            "`dataset` must give `x`, `(x, y)` or `(x, y, sample_weight)`.", parts=len(batch)
        )
    for name, nest in zip(names, keras.utils.unpack_x_y_sample_weight(batch), strict=True):
        yield from _leaves(name, nest)


def _leaves(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict):
        for key, part in nest.items():
            yield from _leaves(f"{name}[{key!r}]", part)
    elif isinstance(nest, (list, tuple)):
        for index, part in enumerate(nest):
            yield from _leaves(f"{name}[{index}]", part)
    elif nest is not None and type(nest).__name__ != "NoneTensorSpec":  # of `tf.data`
        yield name, nest
