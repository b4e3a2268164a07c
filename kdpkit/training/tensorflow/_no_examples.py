"""Convolutions, poolings and recurrent layers on replicas that have no examples of a batch.

Of no examples oneDNN's convolutions give the shape of their input, and the gradient of its
max-pooling ends the process (docs/upstream/onednn_without_examples.md). On a GPU cuDNN's gradient
of a 3D convolution raises (tensorflow/tensorflow#60935), and its recurrent layers do. While a step
is traced these operations get one example where there is none, and it is taken off what they give.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from kdpkit._internal import versions
from kdpkit.training.tensorflow._collectives import with_gradient
from kdpkit.training.tensorflow._step import current_step

# Operations, with the position and the name of what has the examples along its first axis, and the
# devices that need an example.
_OPERATIONS = {
    "conv2d": (0, "input", "CPU"),
    "conv3d": (0, "input", "CPU, GPU"),
    "depthwise_conv2d_native": (0, "input", "CPU"),
    "max_pool": (0, "input", "CPU"),
    "max_pool3d": (0, "input", "CPU"),
    "conv2d_backprop_input": (2, "out_backprop", "CPU"),
    "conv3d_backprop_input_v2": (2, "out_backprop", "CPU, GPU"),
}
_RNN = importlib.import_module("keras.src.backend.tensorflow.rnn")  # `rnn` is a function, too
_OF_CUDNN = ("_cudnn_lstm", "_cudnn_gru")
_OF_GRADIENTS = "tensorflow.python.ops.nn_grad"  # they get what operations had, which is not empty


@contextlib.contextmanager
def guarded_operations() -> Iterator[None]:
    """Let steps call operations that oneDNN or cuDNN compute, on replicas without examples."""
    names = [(gen_nn_ops, name) for name in _OPERATIONS] + [(_RNN, name) for name in _OF_CUDNN]
    originals = {(owner, name): getattr(owner, name, None) for owner, name in names}
    for (owner, name), original in originals.items():
        if original is None:
            versions.reject_unknown(name, tensorflow=tf.__version__)
        if not hasattr(original, "is_guarded"):  # as in an evaluation, inside of training
            guarded = (
                guarded_rnn(original) if owner is _RNN else _guarded(original, *_OPERATIONS[name])
            )
            setattr(owner, name, guarded)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def guarded_rnn(original: Callable, devices: str = "GPU") -> Callable:
    """Have a recurrent layer's function get one example, not masked, where there is none."""

    @functools.wraps(original)
    def layer(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        inputs, mask = given["inputs"], given["mask"]
        if not _may_lack_examples(inputs, devices):
            return original(*args, **kwargs)
        num_examples = tf.shape(inputs)[0]
        for name in given:
            if name == "inputs" or name.startswith("initial_state"):
                given[name] = _with_one(num_examples, given[name])
        if mask is not None:
            unmasked = functools.partial(tf.ones, [1, tf.shape(mask)[1]], mask.dtype)
            given["mask"] = tf.cond(num_examples > 0, lambda: mask, unmasked)
        outputs = original(**given)
        return tf.nest.map_structure(functools.partial(_without_one, num_examples), outputs)

    layer.is_guarded = True  # type: ignore[attr-defined]  # marks what is guarded already
    return layer


def _guarded(original: Callable, position: int, name: str, devices: str) -> Callable:
    @functools.wraps(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        key = position if position in given else name
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == _OF_GRADIENTS or key not in given:
            return original(*args, **kwargs)
        if not _may_lack_examples(given[key], devices):
            return original(*args, **kwargs)
        tensors = [x for x in given.values() if isinstance(x, tf.Tensor)]
        examples = tf.convert_to_tensor(given[key])
        num_examples = tf.shape(examples)[0]
        given[key] = _with_one(num_examples, examples)
        if position:  # a transposed convolution, which takes the shape of its output
            sizes = 0 if 0 in given else "input_sizes"
            given[sizes] = tf.concat([tf.maximum(given[sizes][:1], 1), given[sizes][1:]], 0)
        in_order = [given.pop(index) for index in range(len(args))]
        outputs = _without_one(num_examples, original(*in_order, **given))
        step: Any = current_step()
        if step.trial is not None:  # what is added here is no part of the step
            step.trial.layers.append((tensors, [outputs]))
        return outputs

    operation.is_guarded = True  # type: ignore[attr-defined]  # marks what is guarded already
    return operation


def _may_lack_examples(tensor: Any, devices: str) -> bool:
    step = current_step()
    return (
        step is not None
        and step.replicas > 1
        and tensor.shape[0] is None
        and any(
            (tf.DeviceSpec.from_string(device).device_type or "") in devices.split(", ")
            for device in step.strategy.extended.worker_devices
        )
    )


def _with_one(num_examples: tf.Tensor, x: Any) -> Any:
    """Return a tensor, or one example of zeros in its place if it has no examples."""
    zeros = functools.partial(tf.zeros, tf.concat([[1], tf.shape(x)[1:]], 0), x.dtype)
    given = tf.cond(num_examples > 0, lambda: x, zeros)
    given.set_shape(x.shape)
    _note(x, given)
    return with_gradient(given, x, functools.partial(_without_one, num_examples))


def _note(x: Any, given: Any) -> None:
    step = current_step()
    if step is not None:
        step.note_layer(x, given)


def _without_one(num_examples: tf.Tensor, y: Any) -> Any:
    """Return the examples that a tensor has without that example."""
    given = y[:num_examples]
    _note(y, given)
    return with_gradient(given, y, functools.partial(_with_one, num_examples))
