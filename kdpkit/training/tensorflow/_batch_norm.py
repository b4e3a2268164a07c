"""BatchNormalization on parts: statistics of the global batch, or of each device's examples."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._collectives import summed, with_summed_gradient
from kdpkit.training.tensorflow._split import Split, entries_per_example
from kdpkit.training.tensorflow._step import Step, current_part
from kdpkit.training.tensorflow._tensor_parts import moved_to

GLOBAL, REPLICA = "global", "replica"


def warn_of_local_statistics(model: keras.Model | None, replicas: int) -> None:
    """Warn if the model, or without one the step, may have layers that this is true of."""
    names = [
        layer.name
        for layer in (model._flatten_layers() if model else ())
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not layer.synchronized
    ]
    if replicas > 1 and (names or model is None):
        listed = f" ({', '.join(names)})" if names else ""
        warnings.warn(
            f"BatchNormalization{listed} normalizes by each replica's own examples, so "
            f"training on {replicas} replicas differs from one device; "
            '`batch_norm="global"` makes it equal, except on a TPU.',
            stacklevel=2,
        )


def moments(original: Callable, layer: Any, inputs: Any, mask: Any) -> Any:
    """Return the statistics of all examples to a layer that is called on a part."""
    part = current_part()
    if part is None or part.moments is None:
        return original(layer, inputs, mask)
    return part.moments


@contextlib.contextmanager
def with_float32_inputs(step: Step, layer: Any, calls: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cast the inputs of a layer to float32, for the calls that are made in this.

    The inputs' gradient is a sum of the layer's and of its statistics', which would overflow in
    half precision where one device's does not.
    """
    if keras.backend.result_type(layer.compute_dtype, "float32") == layer.compute_dtype:
        yield calls
        return
    wide_calls = []
    for device, ((inputs, *args), kwargs) in zip(step.mesh.devices, calls, strict=True):
        with tf.device(device):
            x = tf.cast(tf.cast(inputs, layer.compute_dtype), tf.float32)
        if (mask := get_keras_mask(inputs)) is not None:
            set_keras_mask(x, mask)
        wide_calls.append(((x, *args), kwargs))
    layer.autocast = False
    try:
        yield wide_calls
    finally:
        layer.autocast = True


def moments_of_parts(step: Step, layer: Any, split: Split, calls: Sequence[Any]) -> Any:
    """Return mean and variance of all examples on each device; None if parts have their own.

    They are computed in two passes, as TensorFlow does on one device: a difference of squares would
    cancel. TensorFlow leaves the computation out where the layer does not train.
    """
    if step.batch_norm == REPLICA and not layer.synchronized:
        return None
    devices, axes = step.mesh.devices, layer._reduction_axes
    parts, sums, counts, squares = [], [], [], []
    for device, count, unborrowed, (args, kwargs) in zip(
        devices, split.counts, split.unborrowed, calls, strict=True
    ):
        with tf.device(device):
            x, weights = _weighted(layer, count, unborrowed, *args, **kwargs)
            if weights is None:
                sums.append(tf.reduce_sum(x, axes))
                counts.append(tf.cast(tf.size(x) // tf.maximum(tf.size(sums[-1]), 1), x.dtype))
            else:
                sums.append(tf.reduce_sum(tf.math.multiply_no_nan(x, weights), axes))
                counts.append(tf.reduce_sum(weights, axes))
        parts.append((x, weights))
    is_weighted = parts[0][1] is not None
    epsilon = keras.config.epsilon() if is_weighted else 0.0
    with tf.device(step.mesh.home):
        factor = tf.math.reciprocal_no_nan(_sum(step, counts) + epsilon)
        mean = with_summed_gradient(step.mesh, _sum(step, sums) * factor, step.channel())
    for device, (x, weights) in zip(devices, parts, strict=True):
        center = moved_to(device, mean)
        with tf.device(device):
            if not is_weighted:  # As in `tf.nn.moments`, which second derivatives show.
                center = tf.stop_gradient(center)
            reduced = {axis % x.shape.rank for axis in axes}
            shape = [1 if axis in reduced else -1 for axis in range(x.shape.rank)]
            deviations = x - tf.reshape(center, shape)
            if is_weighted:
                deviations = tf.math.multiply_no_nan(deviations, weights)
            squares.append(tf.reduce_sum(tf.square(deviations), axes))
    with tf.device(step.mesh.home):
        variance = with_summed_gradient(step.mesh, _sum(step, squares) * factor, step.channel())
    return [(moved_to(device, mean), moved_to(device, variance)) for device in devices]


def _weighted(
    layer: Any, count: Any, unborrowed: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Return a part's examples, without a borrowed one, and the weights that a mask gives them."""
    del training
    mask = get_keras_mask(inputs) if mask is None else mask
    length = unborrowed * entries_per_example(inputs, count)
    x = tf.cast(inputs[:length], keras.backend.result_type(layer.compute_dtype, "float32"))
    if mask is None:
        return x, None
    weights = tf.broadcast_to(tf.expand_dims(mask[:length], -1), tf.shape(x))
    return x, tf.cast(weights, x.dtype)


def _sum(step: Step, values: Sequence[Any]) -> Any:
    total = tf.add_n([moved_to(step.mesh.home, value) for value in values])
    return summed(step.mesh, total, step.channel())
