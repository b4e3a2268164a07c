"""BatchNormalization on replicas: the one Keras layer whose rows meet in a batch."""

import warnings
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._step import current_step


def batch_norm_layers(model: Any) -> list[Any]:
    """List the BatchNormalization layers that train."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def warn_of_local_statistics(layers: list[Any], replicas: int) -> None:
    """Say in one line which layers normalize by a replica's rows alone, and how to change that."""
    local = [layer.name for layer in layers if not layer.synchronized]
    if local:
        warnings.warn(
            f"BatchNormalization ({', '.join(local)}) normalizes by each replica's own rows, so "
            f"training on {replicas} replicas differs from one device; pass "
            "`BatchNormalization(synchronized=True)` to make it equal.",
            stacklevel=2,
        )


def attach_to_synchronized(layer: Any) -> None:
    """Make a synchronized layer's statistics those of the whole batch in every case."""
    stock_moments = layer._moments

    def moments(inputs: Any, mask: Any) -> Any:
        step = current_step()
        if step is None:
            return stock_moments(inputs, mask)
        if not step.share_in_loss:
            inputs = _scale_gradient(inputs, tf.math.reciprocal_no_nan(step.share))
        if mask is None:
            both = stock_moments(inputs, mask)
        else:
            both = _masked_moments(inputs, mask, layer._reduction_axes)
        if not step.share_in_loss:
            both = tuple(_scale_gradient(moment, step.share) for moment in both)
        return both

    layer._moments = moments


def _masked_moments(inputs: Any, mask: Any, axes: list[int]) -> Any:
    """Compute what Keras does under a mask, of all replicas' rows (Keras: of each replica's)."""
    context = tf.distribute.get_replica_context()
    weights = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), inputs.dtype)

    def mean(values: Any) -> Any:
        total, count = context.all_reduce(
            tf.distribute.ReduceOp.SUM,
            [tf.reduce_sum(values * weights, axes), tf.reduce_sum(weights, axes)],
        )
        return total / (count + keras.config.epsilon())

    center = mean(inputs)
    return center, mean(tf.square(inputs - center))


@tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
def _scale_gradient(value: Any, factor: Any) -> Any:
    """Pass a value on, and its gradient multiplied by a factor.

    A share that is put on the gradients last, instead of on the loss first, comes too late for
    what synchronized statistics add up from all replicas on the way back. So it is put on there,
    and taken off again for the rest of the way.
    """
    return tf.identity(value), lambda upstream: (
        tf.math.multiply_no_nan(upstream, tf.cast(factor, upstream.dtype)),
        None,
    )
