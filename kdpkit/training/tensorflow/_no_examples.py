"""Convolutions, poolings, recurrent layers and the CTC loss on replicas that have no examples.

Of no examples oneDNN's convolutions give the shape of their input, and the gradient of its
max-pooling ends the process (docs/upstream/onednn_without_examples.md). On a GPU cuDNN's gradient
of a 3D convolution raises (tensorflow/tensorflow#60935), and its recurrent layers do. The CTC loss
raises on both. While a step
is traced these operations get one example where there is none, and it is taken off what they give;
not those that XLA compiles: it needs none, and would know no size that depends on values.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import (
    KERAS_NN,
    KERAS_RNN,
    control_flow_util,
    gen_nn_ops,
    with_gradient,
)
from kdpkit.training.tensorflow._step import current_step

# Functions by where they are, with the arguments that have the examples along their first axis, the
# first of which is never None, and the devices that need an example.
FUNCTIONS: dict[Any, dict[str, tuple[tuple[str, ...], str]]] = {
    gen_nn_ops: {
        "conv2d": (("input",), "CPU"),
        "conv3d": (("input",), "CPU, GPU"),
        "depthwise_conv2d_native": (("input",), "CPU"),
        "max_pool": (("input",), "CPU"),
        "max_pool3d": (("input",), "CPU"),
        "conv2d_backprop_input": (("out_backprop",), "CPU"),
        "conv3d_backprop_input_v2": (("out_backprop",), "CPU, GPU"),
    },
    KERAS_RNN: {
        "_cudnn_lstm": (("inputs", "initial_state_h", "initial_state_c"), "GPU"),
        "_cudnn_gru": (("inputs", "initial_state"), "GPU"),
    },
    KERAS_NN: {"ctc_loss": (("output", "target", "target_length", "output_length"), "CPU, GPU")},
}
_COMPILED: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs of functions that XLA compiles


def guarded(
    examples: tuple[str, ...], devices: str, original: Callable, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function of `FUNCTIONS` with one example where a replica has none."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    first = given[examples[0]]
    # The gradient of what was guarded has an example already.
    if not _may_lack_examples(first, devices) or getattr(first, "kdpkit_has_example", False):
        return original(*args, **kwargs)
    if _is_compiled(given):
        return original(*args, **kwargs)
    count = _count(tf.convert_to_tensor(first))
    for name in examples:
        given[name] = _with_one(count, tf.convert_to_tensor(given[name]))
    if (sizes := given.get("input_sizes")) is not None:  # a transposed convolution's output
        given["input_sizes"] = tf.concat([tf.maximum(sizes[:1], 1), sizes[1:]], 0)
    if (mask := given.get("mask")) is not None:  # of which nothing may be masked
        unmasked = functools.partial(tf.ones, [1, tf.shape(mask)[1]], mask.dtype)
        given["mask"] = tf.cond(count.is_any, lambda: mask, unmasked)
    outputs = original(**given)
    return tf.nest.map_structure(functools.partial(_without_one, count), outputs)


def _may_lack_examples(tensor: Any, devices: str) -> bool:
    step = current_step()
    return (
        step is not None
        and step.replicas > 1
        and not tensor.shape[0]  # unknown, or none in a step that runs eagerly
        and any(
            (tf.DeviceSpec.from_string(device).device_type or "") in devices.split(", ")
            for device in step.strategy.extended.worker_devices
        )
    )


def _is_compiled(given: dict[str, Any]) -> bool:
    """Return whether XLA compiles an operation, or the one that it is the gradient of."""
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        _COMPILED.add(graph)
    return graph in _COMPILED or any(
        of.graph in _COMPILED for of in given.values() if tf.is_symbolic_tensor(of)
    )


class _Count(NamedTuple):
    """How many examples a tensor has, in a vector, whether any, and in which graph of a step."""

    number: tf.Tensor
    is_any: tf.Tensor
    graph: Any


def _count(x: tf.Tensor) -> _Count:
    zero, one = tf.constant([0]), tf.constant([1])
    shape = tf.raw_ops.Shape(input=x)
    number = tf.raw_ops.StridedSlice(input=shape, begin=zero, end=one, strides=one)
    step = current_step()
    is_here = step is not None and step.is_here() and not tf.executing_eagerly()
    graph = tf.compat.v1.get_default_graph() if is_here else None
    return _Count(number, tf.cast(tf.raw_ops.Squeeze(input=number), tf.bool), graph)


def _with_one(count: _Count, x: Any) -> Any:
    """Return a tensor, or one example of zeros in its place if it has no examples.

    The two operations are those of a condition without its functions, which take several times as
    long to trace, and nothing is copied. oneDNN would take a `tf.pad` alone for its convolution's.
    Loops need the condition.
    """
    if tf.compat.v1.get_default_graph() is count.graph:
        without, given = tf.raw_ops.Switch(data=x, pred=count.is_any)
        around = tf.constant([[0, 1]] + [[0, 0]] * (x.shape.rank - 1))
        padded = tf.raw_ops.Pad(input=without, paddings=around)
        given = tf.raw_ops.Merge(inputs=[padded, given]).output
    else:
        zeros = functools.partial(tf.zeros, tf.concat([[1], tf.shape(x)[1:]], 0), x.dtype)
        given = tf.cond(count.is_any, lambda: x, zeros)
    given.set_shape([None, *x.shape[1:]])
    given = with_gradient(given, x, functools.partial(_without_one, count))
    given.kdpkit_has_example = True
    return given


def _without_one(count: _Count, y: Any) -> Any:
    """Return the examples that a tensor has without that example."""
    given = tf.raw_ops.StridedSlice(input=y, begin=[0], end=count.number, strides=[1])
    return with_gradient(given, y, functools.partial(_with_one, count))
