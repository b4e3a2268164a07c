"""BatchNormalization on replicas: statistics of the global batch, or of each replica's examples."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow._collectives import summed
from kdpkit.training.tensorflow._step import ReplicaStep, current_step

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
    """Compute a layer's statistics over the global batch; its config stays as it is."""
    step = current_step()
    if step is None or step.replicas == 1 or step.own is not None:
        return original(layer, inputs, mask)
    if step.batch_norm == REPLICA and not layer.synchronized:
        return original(layer, inputs, mask)
    step.equal.update(id(variable.value) for variable in layer.non_trainable_variables)
    return _global_moments(step, inputs, mask, layer._reduction_axes)


def _global_moments(step: ReplicaStep, inputs: Any, mask: Any, axes: list[int]) -> Any:
    """Compute mean and variance over the examples of all replicas; under a mask as Keras does.

    In two passes, as TensorFlow does on one device: a difference of squares cancels.
    """
    wide = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
    if mask is None:
        total = tf.reduce_sum(wide, axes)
        own_count = tf.cast(tf.size(wide) // tf.maximum(tf.size(total), 1), wide.dtype)
    else:
        weights = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(wide)), wide.dtype)
        total = tf.reduce_sum(tf.math.multiply_no_nan(wide, weights), axes)
        own_count = tf.reduce_sum(weights, axes)
    total, count = summed(step, total, own_count)
    if mask is not None:
        count += keras.config.epsilon()
    share = tf.math.reciprocal_no_nan(count)  # a product has less to differentiate than a quotient
    mean = total * share
    reduced = {axis % wide.shape.rank for axis in axes}
    shape = [1 if axis in reduced else -1 for axis in range(wide.shape.rank)]
    deviations = wide - tf.reshape(mean, shape)
    if mask is not None:
        deviations = tf.math.multiply_no_nan(deviations, weights)
    (squares,) = summed(step, tf.reduce_sum(tf.square(deviations), axes))
    variance = squares * share
    if inputs.dtype == wide.dtype:
        return mean, variance
    limits = inputs.dtype.min, inputs.dtype.max
    return tuple(
        tf.cast(tf.clip_by_value(moment, *limits), inputs.dtype) for moment in (mean, variance)
    )
