"""The batches of a dataset of any kind: their parts, and which sizes vary.

Nothing is changed: a dataset that counts its epochs begins afterwards where it did before, and the
random numbers of Python and NumPy continue where they were. The exception is a
`tf.data.Dataset.shuffle` that shuffles each iteration again, which counts this one too.
"""

import contextlib
import copy
import dataclasses
import math
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.batches import ArrayBatches, num_examples
from kdpkit.diagnostics import _text

_BATCH_SIZE_OF_KERAS = 32  # of arrays in `fit`
_LOADERS = ("MapDataset", "IterDataset", "DataLoader")  # of Grain and PyTorch, which `fit` takes
_SHOWN = 4  # names in a sentence


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a batch.

    Attributes:
        name: As in `x['token_ids']`.
        shape: With None where batches differ, or nothing shows that they do not; None if even the
            number of axes is open.
        dtype: The name of its type; `"object"` for Python objects, such as lists.
        is_dense: Whether it is a plain array, neither ragged nor sparse.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: str
    is_dense: bool = True


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a dataset.

    Attributes:
        parts: The arrays of a batch.
        first: The first batch, for whose shapes a step is compiled.
        examples: Examples of the first batch.
        looked_at: Which batches that was taken from; None where it holds for all.
    """

    parts: tuple[Part, ...]
    first: Any
    examples: int
    looked_at: str | None = None


def batches_of(dataset: Any, batch_size: int | None = None, *, name: str = "dataset") -> Batches:
    """Return what the batches of a dataset are.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain dataset, a PyTorch
            `DataLoader`, or arrays.
        batch_size: Of the batches that `fit` splits arrays into; None as in Keras.
        name: Of the argument.

    Raises:
        ValueError: It is none of these, is empty, or raises before its first batch.
    """
    size = _BATCH_SIZE_OF_KERAS if batch_size is None else checks.integer("batch_size", batch_size)
    try:
        with random_numbers_kept():
            first, last, looked_at = _ends(dataset, size)
            if is_tf_dataset(dataset):
                specs = _named(dataset.element_spec)
                parts = tuple(_part_of_spec(part, spec) for part, spec in specs)
            else:
                parts = _parts(dict(_named(first)), dict(_named(last)))
            return Batches(parts, first, _examples(first, parts), looked_at)
    except errors.InputError as error:
        text = str(error).replace("`dataset`", f"`{name}`").replace("dataset=", f"{name}=")
        raise errors.InputError(text) from error


def is_generator(value: Any) -> bool:
    """Return whether it is a Python generator, which yields each batch once."""
    return isinstance(value, types.GeneratorType)


def are_arrays(data: Any) -> bool:
    """Return whether `fit` cuts it into batches itself."""
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


def split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Cut arrays as Keras does for `validation_split`: the last examples are held out."""
    first = math.floor(num_examples(arrays) * (1 - fraction))
    return as_arrays(arrays, 0, first), as_arrays(arrays, first)


def is_tf_dataset(value: Any) -> bool:
    """Return whether it is a `tf.data.Dataset`, without loading TensorFlow for it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


def untracked(dataset: keras.utils.PyDataset) -> keras.utils.PyDataset:
    """Return the dataset that `Resume` tracks, or one that it does not track itself."""
    return vars(dataset).get("_dataset", dataset)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the random states of Python and NumPy at the end."""
    states = random.getstate(), np.random.get_state()  # a dataset may draw from them
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _ends(dataset: Any, size: int) -> tuple[Any, Any, str | None]:
    """Return the first batch, the last one where it can be had, and which these are."""
    if isinstance(dataset, keras.utils.PyDataset):
        return _ends_of_py_dataset(copy.copy(untracked(dataset)))  # which may count what is taken
    # A Grain dataset or a PyTorch `DataLoader`, without loading these.
    is_loader = any(
        parent.__name__ in _LOADERS and parent.__module__.split(".")[0] in ("grain", "torch")
        for parent in type(dataset).__mro__
    )
    if is_loader or is_tf_dataset(dataset):
        first = _first(iter(dataset), dataset)
        return first, first, "the first batch" if is_loader else None
    if not any(hasattr(p, "shape") and hasattr(p, "dtype") for p in keras.tree.flatten(dataset)):
        checks.fail(
            "`dataset` must be a `tf.data.Dataset`, a `keras.utils.PyDataset` such as "
            "`kdpkit.batches.ArrayBatches`, a Grain dataset, or arrays.",
            dataset=type(dataset).__name__,
        )
    last = (num_examples(dataset) - 1) // size * size
    return as_arrays(dataset, 0, size), as_arrays(dataset, last, last + size), None


def _ends_of_py_dataset(dataset: keras.utils.PyDataset) -> tuple[Any, Any, str | None]:
    try:
        count = dataset.num_batches
    except NotImplementedError:  # raised by the property that a subclass without a length inherits
        checks.fail(
            "`dataset` does not report how many batches it has, and `fit` asks.",
            dataset=type(dataset).__name__,
            remedy="Define `__len__`, or the property `num_batches`, which is None if it is "
            "endless.",
        )
    first = _first(map(dataset.__getitem__, range(1 if count is None else count)), dataset)
    if count is None:
        return first, first, "the first batch"
    last = first if count == 1 else _first(map(dataset.__getitem__, [count - 1]), dataset)
    is_uniform = isinstance(dataset, ArrayBatches) and dataset.augment is None
    is_seen = is_uniform or count <= 2
    return first, last, None if is_seen else f"the first and the last of {count} batches"


def _first(batches: Iterator[Any], dataset: Any) -> Any:
    try:
        first = next(batches, None)
    except Exception as error:  # reading and preparing examples may raise anything
        raise errors.InputError(
            f"`dataset` raises before its first batch: {_text.reason_of(error)}. Fix that first: "
            "training would fail in the same way."
        ) from error
    if first is None:
        checks.fail("`dataset` is empty: it has no batch.", dataset=type(dataset).__name__)
    return tuple(first) if isinstance(first, list) else first


def _part_of_spec(name: str, spec: Any) -> Part:
    shape = getattr(spec, "shape", None)
    shape = None if shape is None or shape.rank is None else tuple(shape)
    dtype = getattr(getattr(spec, "dtype", None), "name", type(spec).__name__)
    return Part(name, shape, dtype, is_dense=type(spec).__name__ == "TensorSpec")


def _parts(arrays: dict[str, Any], others: dict[str, Any]) -> tuple[Part, ...]:
    """Describe all batches by the first and the last one."""
    if [*arrays] != [*others]:
        checks.fail(
            "`dataset` has batches of different parts.",
            first=[*arrays][:_SHOWN],
            last=[*others][:_SHOWN],
            remedy="All must have those of the first.",
        )
    numbers = [name for name, part in arrays.items() if not hasattr(part, "shape")]
    if numbers:
        checks.fail(
            "`dataset` has lists of Python's numbers or other objects, and must have arrays.",
            parts=[*numbers[:_SHOWN], *["..."] * (len(numbers) > _SHOWN)],
            remedy="Make them with `np.asarray`.",
        )
    return tuple(_part_of(name, arrays[name], others[name]) for name in arrays)


def _part_of(name: str, array: Any, other: Any) -> Part:
    shape = None
    if len(array.shape) == len(other.shape):
        sizes = zip(array.shape, other.shape, strict=True)
        shape = tuple(one if one == two else None for one, two in sizes)
    if not hasattr(array, "__array__"):  # sparse, of TensorFlow or SciPy
        return Part(name, shape, getattr(array.dtype, "name", ""), is_dense=False)
    array = np.asarray(array)
    if array.dtype.kind == "O" and not any(isinstance(v, str | bytes) for v in array.flat):
        return Part(name, shape, "object", is_dense=False)
    return Part(name, shape, "string" if array.dtype.kind in "OSU" else array.dtype.name)


def _examples(first: Any, parts: tuple[Part, ...]) -> int:
    shapes = [tuple(part.shape) for _, part in _named(first) if hasattr(part, "dtype")]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if 0 in sizes or len(sizes) > 1:
        checks.fail(
            "`dataset` has single examples, and must have batches.",
            shapes=[part.shape for part in parts],
            remedy="Add `.batch(global_batch_size, drop_remainder=True)`.",
        )
    return int(next(iter(sizes), 0))


def _named(batch: Any) -> Iterator[tuple[str, Any]]:
    names = ("x", "y", "sample_weight")
    if isinstance(batch, list | tuple) and not 1 <= len(batch) <= len(names):
        checks.fail(
            "`dataset` must have batches `x`, `(x, y)` or `(x, y, sample_weight)`.",
            parts=len(batch),
        )
    for name, nest in zip(names, keras.utils.unpack_x_y_sample_weight(batch), strict=True):
        yield from _leaves(name, nest)


def _leaves(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict | list | tuple):
        inner = nest.items() if isinstance(nest, dict) else enumerate(nest)
        for key, part in inner:
            yield from _leaves(f"{name}[{key!r}]", part)
    elif nest is not None and type(nest).__name__ != "NoneTensorSpec":  # of `tf.data`
        yield name, nest
