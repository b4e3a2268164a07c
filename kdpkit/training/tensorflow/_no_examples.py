"""Convolutions and poolings on replicas of a CPU that have no examples of a batch.

Of no examples oneDNN's convolutions give the shape of their input, and the gradient of its
max-pooling ends the process (docs/upstream/onednn_without_examples.md). While a step is traced
these operations get one example of zeros where there is none, and it is taken off what they give.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from kdpkit._internal import versions
from kdpkit.training.tensorflow._collectives import with_gradient
from kdpkit.training.tensorflow._step import current_step

# Operations, with the position and the name of what has the examples along its first axis.
_OPERATIONS = {
    "conv2d": (0, "input"),
    "conv3d": (0, "input"),
    "depthwise_conv2d_native": (0, "input"),
    "max_pool": (0, "input"),
    "max_pool3d": (0, "input"),
    "conv2d_backprop_input": (2, "out_backprop"),
    "conv3d_backprop_input_v2": (2, "out_backprop"),
}
_OF_GRADIENTS = "tensorflow.python.ops.nn_grad"  # they get what operations had, which is not empty


@contextlib.contextmanager
def guarded_operations() -> Iterator[None]:
    """Let steps call operations that oneDNN computes, on replicas without examples."""
    originals = {name: getattr(gen_nn_ops, name, None) for name in _OPERATIONS}
    for name, original in originals.items():
        if original is None:
            versions.reject_unknown(name, tensorflow=tf.__version__)
        if not hasattr(original, "is_guarded"):  # as in an evaluation, inside of training
            setattr(gen_nn_ops, name, _guarded(original, *_OPERATIONS[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gen_nn_ops, name, original)


def _guarded(original: Callable, position: int, name: str) -> Callable:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        key = position if position in given else name
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == _OF_GRADIENTS or key not in given or not _may_lack_examples(given[key]):
            return original(*args, **kwargs)
        examples = tf.convert_to_tensor(given[key])
        num_examples = tf.shape(examples)[0]
        given[key] = _with_one(num_examples, examples)
        if position:  # a transposed convolution, which takes the shape of its output
            sizes = 0 if 0 in given else "input_sizes"
            given[sizes] = tf.concat([tf.maximum(given[sizes][:1], 1), given[sizes][1:]], 0)
        in_order = [given.pop(index) for index in range(len(args))]
        return _without_one(num_examples, original(*in_order, **given))

    operation.is_guarded = True  # type: ignore[attr-defined]  # marks what is guarded already
    return operation


def _may_lack_examples(tensor: Any) -> bool:
    step = current_step()
    return (
        step is not None
        and step.replicas > 1
        and tensor.shape[0] is None
        and any("CPU" in device.upper() for device in step.strategy.extended.worker_devices)
    )


def _with_one(num_examples: tf.Tensor, x: Any) -> Any:
    """Return a tensor, or one example of zeros in its place if it has no examples."""
    zeros = functools.partial(tf.zeros, tf.concat([[1], tf.shape(x)[1:]], 0), x.dtype)
    given = tf.cond(num_examples > 0, lambda: x, zeros)
    given.set_shape(x.shape)
    return with_gradient(given, x, functools.partial(_without_one, num_examples))


def _without_one(num_examples: tf.Tensor, y: Any) -> Any:
    """Return the examples that a tensor has without that example."""
    given = y[:num_examples]
    return with_gradient(given, y, functools.partial(_with_one, num_examples))
