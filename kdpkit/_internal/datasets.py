"""Datasets of tf.data without its tuning thread, and without memory of the user's arrays.

TensorFlow uses the arrays of a Python generator without a copy, and may compute in place in a
slice of one. So `y_true - y_pred` on a replica's part of a batch overwrites the user's labels, and
the next epoch trains on the differences. Once this is fixed upstream, the copies can go:
`docs/upstream/tensorflow_writes_into_numpy_arrays.py`.

The private parts of tf.data that are read here are the same in TensorFlow 2.20 and 2.21. A dataset
that does not have them is copied.
"""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "IteratorGetNext"})
_COPYING = ("Batch", "ParallelBatch", "PaddedBatch")  # how the names of dataset classes begin
# These sources have memory of TensorFlow's own, or hold the arrays while they are used.
_SAFE = (
    *("Tensor", "SparseTensorSlice", "Range", "Random", "MatchingFiles"),
    *("TextLine", "TFRecord", "FixedLengthRecord", "Csv"),
)


def with_private_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Copy each batch, unless no tensor can share memory with an array of the user's.

    Stages that batch copy already. So only generators of batches, and Python functions after
    `batch`, cost a copy; other pipelines stay as they are.

    >>> numbers = tf.data.Dataset.from_generator(lambda: iter([[1.0]]), tf.float32)
    >>> with_private_batches(numbers) is numbers
    False
    >>> batches = numbers.batch(2)
    >>> with_private_batches(batches) is batches
    True
    """
    if not _may_share(dataset):
        return dataset
    join_arguments = joining(dataset.element_spec)

    def copy(*arguments: Any) -> Any:
        return tf.nest.map_structure(_copy, join_arguments(arguments), expand_composites=True)

    return dataset.map(tf.autograph.experimental.do_not_convert(copy))


def joining(spec: object) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function from the arguments that `map` passes to the element: tuples are spread."""
    return (lambda parts: parts) if type(spec) is tuple else (lambda parts: parts[0])


def _copy(tensor: tf.Tensor | None) -> tf.Tensor | None:
    if tensor is None or tensor.dtype in (tf.string, tf.variant):
        return tensor  # NumPy's strings are copied already
    # `tf.identity` and others may return the same memory.
    return tf.raw_ops.DeepCopy(x=tensor)


def _may_share(dataset: tf.data.Dataset, *, batches_inside: bool = False) -> bool:
    """Return whether tensors may share memory with arrays of Python: yes, if nothing is known.

    `train_pipeline` batches datasets inside of a function, which captures them.
    """
    batches_inside = batches_inside or hasattr(dataset, "epoch_counter")
    for function in getattr(dataset, "_functions", list)():
        captured = [tensor.dtype for tensor in function.function.captured_inputs]
        uses_dataset = tf.variant in captured and not batches_inside
        if uses_dataset or _PYTHON_OPS.intersection(_ops(function)):
            return True
    kind = type(dataset).__name__.lstrip("_")
    if kind.startswith(_COPYING):
        return False
    # `choose_from_datasets` has its data in `_data_inputs`, without the dataset that chooses.
    inputs = getattr(dataset, "_data_inputs", None) or getattr(dataset, "_inputs", list)()
    if not inputs:
        return not kind.startswith(_SAFE)
    return any(_may_share(before, batches_inside=batches_inside) for before in inputs)


def _ops(function: Any) -> Iterator[str]:
    graph = function.function.graph.as_graph_def()
    yield from (node.op for node in graph.node)
    yield from (node.op for inner in graph.library.function for node in inner.node_def)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Fix the parallelism of maps at one call per core, instead of tuning it.

    Deleting an iterator waits for TensorFlow's tuning thread, which can miss the notification and
    sleep for up to a minute: training then stalls between two epochs.
    """
    # Not reported, and no small program shows it: docs/upstream/README.md
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
