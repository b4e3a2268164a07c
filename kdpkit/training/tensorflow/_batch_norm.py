"""BatchNormalization on parts: statistics of the global batch, or of each device's examples."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._collectives import sum_gradients, summed
from kdpkit.training.tensorflow._split import Split, entries_of_each
from kdpkit.training.tensorflow._step import Step, current_part
from kdpkit.training.tensorflow._tensor_parts import to

GLOBAL, REPLICA = "global", "replica"


def batch_norm_layers(model: keras.Model) -> list[Any]:
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


def warn_of_local_statistics(model: keras.Model, replicas: int) -> None:
    """Report which layers normalize by a replica's examples alone, and how to change that."""
    layers = batch_norm_layers(model)
    local = [of.name for of in layers if of.trainable and not of.synchronized]
    if local and replicas > 1:
        warnings.warn(
            f"BatchNormalization ({', '.join(local)}) normalizes by each replica's own examples, "
            f"so training on {replicas} replicas differs from one device; "
            '`batch_norm="global"` makes it equal.',
            stacklevel=2,
        )


def moments(original: Callable, layer: Any, inputs: Any, mask: Any) -> Any:
    """Give a layer that is called on a part the statistics of all; its config stays as it is."""
    part = current_part()
    given = None if part is None else part.moments
    return original(layer, inputs, mask) if given is None else given


@contextlib.contextmanager
def on_wide_inputs(step: Step, layer: Any, calls: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Call a layer in this on inputs of float32, of which it and its statistics have gradients.

    In half precision their sum would overflow where one device's does not.
    """
    if keras.backend.result_type(layer.compute_dtype, "float32") == layer.compute_dtype:
        yield calls
        return
    wide = []
    for device, ((inputs, *args), kwargs) in zip(step.mesh.devices, calls, strict=True):
        with tf.device(device):
            x = tf.cast(tf.cast(inputs, layer.compute_dtype), tf.float32)
        if (mask := get_keras_mask(inputs)) is not None:
            set_keras_mask(x, mask)
        wide.append(((x, *args), kwargs))
    layer.autocast = False
    try:
        yield wide
    finally:
        layer.autocast = True


def moments_of_parts(step: Step, layer: Any, split: Split, calls: Sequence[Any]) -> Any:
    """Compute mean and variance over the examples of all parts, on each device.

    In two passes, as TensorFlow does on one device: a difference of squares cancels. TensorFlow
    leaves it out where the layer does not train.

    Args:
        step: The step.
        layer: The layer.
        split: Which examples each part has.
        calls: What the layer is called on, on each device.

    Returns:
        Mean and variance on each device; None if each part has its own statistics.
    """
    if step.batch_norm == REPLICA and not layer.synchronized:
        return None
    devices, axes = step.mesh.devices, layer._reduction_axes
    parts = []
    for device, count, kept, (args, kwargs) in zip(
        devices, split.counts, split.kept, calls, strict=True
    ):
        with tf.device(device):
            parts.append(_own_examples(layer, count, kept, *args, **kwargs))
    sums, counts = [], []
    for device, (x, weights) in zip(devices, parts, strict=True):
        with tf.device(device):
            if weights is None:
                total = tf.reduce_sum(x, axes)
                count = tf.cast(tf.size(x) // tf.maximum(tf.size(total), 1), x.dtype)
            else:
                total = tf.reduce_sum(tf.math.multiply_no_nan(x, weights), axes)
                count = tf.reduce_sum(weights, axes)
        sums.append(total)
        counts.append(count)
    epsilon = 0.0 if parts[0][1] is None else keras.config.epsilon()
    with tf.device(step.mesh.home):
        share = tf.math.reciprocal_no_nan(_sum(step, counts) + epsilon)
        mean = sum_gradients(step.mesh, _sum(step, sums) * share, step.channel())
    squares = []
    for device, (x, weights) in zip(devices, parts, strict=True):
        own_mean = to(device, mean)
        with tf.device(device):
            if weights is None:
                own_mean = tf.stop_gradient(
                    own_mean
                )  # as `tf.nn.moments`; second derivatives see it
            reduced = {axis % x.shape.rank for axis in axes}
            shape = [1 if axis in reduced else -1 for axis in range(x.shape.rank)]
            deviations = x - tf.reshape(own_mean, shape)
            if weights is not None:
                deviations = tf.math.multiply_no_nan(deviations, weights)
            squares.append(tf.reduce_sum(tf.square(deviations), axes))
    with tf.device(step.mesh.home):
        variance = sum_gradients(step.mesh, _sum(step, squares) * share, step.channel())
    return [(to(device, mean), to(device, variance)) for device in devices]


def _own_examples(
    layer: Any, count: Any, kept: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Return a part's examples and their weights, as the layer computes, without a borrowed one."""
    del training
    mask = get_keras_mask(inputs) if mask is None else mask
    each = entries_of_each(inputs, count)
    x = tf.cast(inputs[: kept * each], keras.backend.result_type(layer.compute_dtype, "float32"))
    if mask is None:
        return x, None
    mask = mask[: kept * each]
    return x, tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(x)), x.dtype)


def _sum(step: Step, values: Sequence[Any]) -> Any:
    total = tf.add_n([to(step.mesh.home, value) for value in values])
    return summed(step.mesh, total, step.channel())
