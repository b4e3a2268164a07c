"""Datasets of tf.data without its tuning thread, and without memory of the user's arrays.

TensorFlow takes the arrays of a Python generator without a copy if they begin at a multiple of 64
bytes, and it computes in place in memory that nobody else uses. A slice of such an array it takes,
wrongly, for memory that nobody else uses. So `y_true - y_pred` on a replica's part of a batch
overwrites the user's labels, and the next epoch trains on the differences. The report is
`docs/upstream/tensorflow_writes_into_numpy_arrays.md`; once TensorFlow has fixed it, this can go.

The private parts of tf.data that are read here are alike in TensorFlow 2.20 and 2.21. A dataset
that does not have them is copied.
"""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "IteratorGetNext"})
_COPYING = ("Batch", "ParallelBatch", "PaddedBatch")  # how the names of dataset classes begin
# Sources whose memory is TensorFlow's, or in use as long as they are.
_SAFE = (
    *("Tensor", "SparseTensorSlice", "Range", "Random", "MatchingFiles"),
    *("TextLine", "TFRecord", "FixedLengthRecord", "Csv"),
)


def with_private_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Copy each batch into memory of its own, unless it surely has such already.

    Batching copies, so that generators of batches cost a copy, and functions in Python that come
    after `batch`; other pipelines stay as they are.

    >>> numbers = tf.data.Dataset.from_generator(lambda: iter([[1.0]]), tf.float32)
    >>> with_private_batches(numbers) is numbers
    False
    >>> batches = numbers.batch(2)
    >>> with_private_batches(batches) is batches
    True
    """
    if not _may_share(dataset):
        return dataset
    joined = joining(dataset.element_spec)

    def copied(*parts: Any) -> Any:
        return tf.nest.map_structure(_copy, joined(parts), expand_composites=True)

    return dataset.map(tf.autograph.experimental.do_not_convert(copied))


def joining(spec: object) -> Callable[[tuple[Any, ...]], Any]:
    """Undo what `map` does to an element that is a plain tuple: it passes parts as arguments."""
    return (lambda parts: parts) if type(spec) is tuple else (lambda parts: parts[0])


def _copy(tensor: tf.Tensor | None) -> tf.Tensor | None:
    if tensor is None or tensor.dtype in (tf.string, tf.variant):
        return tensor  # NumPy's strings are copied already
    # Not `tf.identity`, nor another operation that may hand on the memory that it is given.
    return tf.raw_ops.DeepCopy(x=tensor)


def _may_share(dataset: tf.data.Dataset, *, batches_inside: bool = False) -> bool:
    """Return whether tensors may lie in arrays of Python: yes, if nothing is known.

    `train_pipeline` batches inside of a function, datasets that come from outside of it.
    """
    batches_inside = batches_inside or hasattr(dataset, "epoch_counter")
    for function in getattr(dataset, "_functions", list)():
        captured = [tensor.dtype for tensor in function.function.captured_inputs]
        if _PYTHON_OPS.intersection(_ops(function)):
            return True
        if tf.variant in captured and not batches_inside:
            return True
    kind = type(dataset).__name__.lstrip("_")
    if kind.startswith(_COPYING):
        return False
    # Of a choice between datasets, without what chooses.
    inputs = getattr(dataset, "_data_inputs", None) or getattr(dataset, "_inputs", list)()
    if not inputs:
        return not kind.startswith(_SAFE)
    return any(_may_share(one, batches_inside=batches_inside) for one in inputs)


def _ops(function: Any) -> Iterator[str]:
    graph = function.function.graph.as_graph_def()
    yield from (node.op for node in graph.node)
    yield from (node.op for inner in graph.library.function for node in inner.node_def)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Fix the parallelism of maps at one call per core, in place of tuning it.

    Dropping an iterator waits for TensorFlow's tuning thread, which can miss its wake-up call and
    sleep on for up to a minute: training then stalls between two epochs.
    """
    # Not reported, and no small program shows it: docs/upstream/README.md
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
