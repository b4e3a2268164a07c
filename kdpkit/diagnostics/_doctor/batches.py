"""The first batch of a dataset of any kind, and a dataset that gives it again and again.

A dataset that counts its epochs begins afterwards where it did before. The exception is a
`tf.data.Dataset.shuffle` that shuffles each iteration again, which counts this one too.
"""

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks

_BATCH_SIZE_OF_KERAS = 32  # of arrays in `fit`
_BATCHES_OF_SAME = 1000  # in an epoch of one batch that is given again and again


def first_batch(dataset: Any, batch_size: int | None = None) -> Any:
    """Return the first batch of a dataset.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain dataset, a PyTorch
            `DataLoader`, or arrays.
        batch_size: Of the batches that `fit` splits arrays into; None as in Keras.

    Raises:
        ValueError: It is none of these, is empty, or raises before its first batch.
    """
    size = _BATCH_SIZE_OF_KERAS if batch_size is None else checks.integer("batch_size", batch_size)
    is_iterable = isinstance(dataset, Iterable) and not isinstance(dataset, str | Iterator)
    received = {"dataset": type(dataset).__name__}
    if not (is_iterable or isinstance(dataset, keras.utils.PyDataset)):
        checks.fail(
            "`dataset` must be a `tf.data.Dataset`, a `keras.utils.PyDataset` such as "
            "`kdpkit.batches.ArrayBatches`, a Grain dataset, or arrays; a generator yields each "
            "batch once, and a check would use one up.",
            **received,
        )
    try:
        if isinstance(dataset, keras.utils.PyDataset):
            own = copy.copy(untracked(dataset))  # which may count what is taken
            first = None if own.num_batches == 0 else own[0]
        elif are_arrays(dataset):
            first = as_arrays(dataset, 0, size)
        else:
            first = next(iter(dataset), None)  # also of Grain's, and of PyTorch's `DataLoader`
    except Exception as error:  # reading and preparing examples may raise anything
        raise errors.InputError(
            f"`dataset` raises before its first batch: {checks.reason_of(error)}. Fix that first: "
            "training would fail in the same way."
        ) from error
    if first is None:
        checks.fail("`dataset` is empty: it has no batch.", **received)
    return tuple(first) if isinstance(first, list) else first


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
    """Return whether `fit` splits it into batches itself."""
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


def is_tf_dataset(value: Any) -> bool:
    """Return whether it is a `tf.data.Dataset`, without loading TensorFlow for it."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


def untracked(dataset: keras.utils.PyDataset) -> keras.utils.PyDataset:
    """Return the dataset that `Resume` tracks, or one that it does not track itself."""
    return vars(dataset).get("_dataset", dataset)
