"""On which device gradients are computed, `tf.gradients`, and sparse gradients that become dense.

A tape computes gradients wherever TensorFlow puts them, which is mostly one device. After a step
was traced, they are put where the tensors are that they are computed from.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow import _tensor_parts
from kdpkit.training.tensorflow._step import current_step, key


def place(graph: Any, first: int, devices: tuple[str, ...]) -> None:
    """Put a graph's operations, from the first one given, where their inputs are.

    The sums in which a tape adds up a variable's gradients are spread over the devices.
    """
    next_devices = itertools.cycle(devices)
    operations = graph.get_operations()[first:]
    for operation in operations:
        if operation.device or any(x.dtype == tf.resource for x in operation.inputs):
            continue
        input_devices = [device for x in operation.inputs if (device := x.op.device)]
        if input_devices:
            is_sum = operation.type == "AddN" and len({*input_devices}) > 1
            operation._set_device(next(next_devices) if is_sum else input_devices[0])
    for operation in operations:
        if operation.type == "Const" and not operation.device:
            user_devices = (user.device for user in operation.outputs[0].consumers())
            operation._set_device(next(filter(None, user_devices), ""))


def graph_gradients(original: Callable, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute `tf.gradients`, which follows operations, and not what was recorded for tapes.

    So it arrives at the copies of a variable, and at the parts of a tensor.
    """
    step = current_step()
    if step is None:
        return original(ys, xs, *args, **kwargs)
    arguments = inspect.signature(original).bind(ys, xs, *args, **kwargs).arguments
    sources_of_each = [_sources(step, x) for x in tf.nest.flatten(xs)]
    divided = [
        tensor for tensor, *parts in sources_of_each if parts and isinstance(tensor, tf.Tensor)
    ]
    stopped = tf.nest.flatten(arguments.get("stop_gradients") or ())
    arguments |= {"xs": [*itertools.chain(*sources_of_each)], "stop_gradients": stopped + divided}
    gradients = iter(original(**arguments))
    return [
        _total(step, sources, [next(gradients) for _ in sources]) for sources in sources_of_each
    ]


def _sources(step: Any, x: Any) -> list[Any]:
    """Return a variable's copies, or a tensor and the parts that are used in its place."""
    x = x.value if isinstance(x, keras.Variable) else x
    if isinstance(x, tf.distribute.DistributedValues):
        return [*x.values]
    if not tf.is_symbolic_tensor(x) or key(x) in step.batch_keys:  # whose parts are cut from it
        return [x]
    parts = step.parts.get(key(x))
    return [x] if parts is None else [x, *parts.tensors]


def _total(step: Any, sources: list[Any], gradients: list[Any]) -> Any:
    first, *of_parts = gradients
    if isinstance(sources[0], tf.Tensor) and any(part is not None for part in of_parts):
        filled = [
            tf.zeros_like(source) if gradient is None else gradient
            for source, gradient in zip(sources[1:], of_parts, strict=True)
        ]
        parts = step.parts[key(sources[0])]._replace(tensors=filled)
        gradients = [first, _tensor_parts.join(step, parts)]
    present = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n(present) if present else None


def dense_if_unique(gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Make a sparse gradient dense where it has one slice for each index.

    That is the gradient of a product with sparse features, and of a table of positions that is
    looked up once for the batch (`Embedding(...)(ops.arange(length))`). Several parts would give
    several slices for an index, which Keras' optimizers square one by one. Where examples look a
    table up it has a slice for every lookup, on one device as well, and stays sparse.
    """
    if isinstance(gradient, tf.IndexedSlices) and not tf.executing_eagerly():
        return tf.convert_to_tensor(gradient) if _are_unique(gradient.indices) else gradient
    return gradient


# Each entry of their output comes from the entry at the same position of an input: Keras' `take`
# wraps negative indices with them.
_ENTRY_BY_ENTRY = ("Identity", "Cast", "ExpandDims", "Squeeze", "SelectV2", "Less", "AddV2")
_OF_THE_FIRST_INPUT = ("Reshape", "StridedSlice")  # all of its entries, or some


def _are_unique(indices: tf.Tensor) -> bool:
    """Recognize indices that were made unique, or that count, whatever the examples are."""
    op = indices.op
    if op.type in ("Unique", "UniqueV2", "Range"):
        return True
    if op.type == "Const":
        value = tf.get_static_value(indices)
        return np.ndim(value) > 0 and np.unique(value).size == np.size(value)
    if op.type in _OF_THE_FIRST_INPUT:
        return _are_unique(op.inputs[0])
    inputs = [x for x in op.inputs if x.shape.rank != 0]
    return op.type in _ENTRY_BY_ENTRY and bool(inputs) and all(map(_are_unique, inputs))
