"""Where gradients are computed, `tf.gradients`, and sparse gradients that are made dense.

A tape computes gradients wherever TensorFlow puts them, which is mostly one device. What it has
added to a graph is put, after a step was traced, where what it is computed from is.
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
    """Put a graph's operations that have no device where their inputs are.

    The sums in which a tape adds up a variable's gradients (`_variable_copies`) take turns on the devices.

    Args:
        graph: The graph.
        first: The number of the first of the operations.
        devices: The devices of the parts.
    """
    turns = itertools.cycle(devices)
    operations = graph.get_operations()[first:]
    for operation in operations:
        if operation.device or any(x.dtype == tf.resource for x in operation.inputs):
            continue
        of_inputs = [device for x in operation.inputs if (device := x.op.device)]
        if of_inputs:
            is_sum = operation.type == "AddN" and len({*of_inputs}) > 1
            operation._set_device(next(turns) if is_sum else of_inputs[0])
    for operation in operations:
        if operation.type == "Const" and not operation.device:
            users = (user.device for user in operation.outputs[0].consumers())
            operation._set_device(next(filter(None, users), ""))


def graph_gradients(original: Callable, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute `tf.gradients`, which follows operations, and not what tapes are told.

    It comes to each copy of a variable, and to the parts of a tensor, where a tape comes to the
    variable and to the tensor.
    """
    step = current_step()
    if step is None:
        return original(ys, xs, *args, **kwargs)
    given = inspect.signature(original).bind(ys, xs, *args, **kwargs).arguments
    sources = [_sources(step, x) for x in tf.nest.flatten(xs)]
    of_parts = [of[0] for of in sources if len(of) > 1 and isinstance(of[0], tf.Tensor)]
    given["xs"] = [x for of in sources for x in of]
    given["stop_gradients"] = [*tf.nest.flatten(given.get("stop_gradients") or ()), *of_parts]
    found = iter(original(**given))
    return [_total(step, of, [next(found) for _ in of]) for of in sources]


def _sources(step: Any, x: Any) -> list[Any]:
    """Return a variable's copies, or a tensor and the parts that are used in its place."""
    x = x.value if isinstance(x, keras.Variable) else x
    if isinstance(x, tf.distribute.DistributedValues):
        return [*x.values]
    if not tf.is_symbolic_tensor(x) or key(x) in step.on_host:  # whose parts are cut from it
        return [x]
    parts = step.parts.get(key(x))
    return [x] if parts is None else [x, *parts.tensors]


def _total(step: Any, sources: list[Any], gradients: list[Any]) -> Any:
    if isinstance(sources[0], tf.Tensor) and any(of is not None for of in gradients[1:]):
        pairs = zip(sources[1:], gradients[1:], strict=True)
        filled = [tf.zeros_like(x) if of is None else of for x, of in pairs]
        parts = step.parts[key(sources[0])]._replace(tensors=filled)
        gradients = [gradients[0], _tensor_parts.join(step, parts)]
    present = [gradient for gradient in gradients if gradient is not None]
    return tf.add_n([*map(tf.convert_to_tensor, present)]) if present else None


def dense_if_unique(gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Make a sparse gradient dense where it has one slice for each index.

    That is how products with sparse features give it, and a table of positions that is looked up
    once for the batch (`Embedding(...)(ops.arange(length))`). Those of several parts would be
    several, which Keras' optimizers square one by one. Where examples look a table up it has a
    slice for every lookup, on one device as well, and stays sparse.
    """
    if isinstance(gradient, tf.IndexedSlices) and not tf.executing_eagerly():
        return tf.convert_to_tensor(gradient) if _are_unique(gradient.indices) else gradient
    return gradient


# Of these every entry comes from the entry at its place; `take` of Keras wraps negative indices.
_BY_ENTRY = ("Identity", "Cast", "ExpandDims", "Squeeze", "SelectV2", "Less", "AddV2")
_OF_THE_FIRST_INPUT = ("Reshape", "StridedSlice")  # all of its entries, or some


def _are_unique(indices: tf.Tensor) -> bool:
    """Recognize indices that have been made unique, or that count, whatever the examples are."""
    op = indices.op
    if op.type in ("Unique", "UniqueV2", "Range"):
        return True
    if op.type == "Const":
        value = tf.get_static_value(indices)
        return np.ndim(value) > 0 and np.unique(value).size == np.size(value)
    if op.type in _OF_THE_FIRST_INPUT:
        return _are_unique(op.inputs[0])
    entries = [part for part in op.inputs if part.shape.rank != 0]
    return op.type in _BY_ENTRY and bool(entries) and all(map(_are_unique, entries))
