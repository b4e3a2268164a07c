"""The mean loss of a batch that several devices share, for training loops of your own."""

import tensorflow as tf

from kdpkit._internal import checks


def global_mean_loss(
    per_example: tf.Tensor,
    *,
    global_batch_size: int | tf.Tensor | None = None,
    sample_weight: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return one device's part of the mean loss of a batch that several devices share.

    For a training loop that you write with `strategy.run`, which calls your step on each device (a
    replica) with its part of the batch. There this returns `sum(per_example * sample_weight) /
    global_batch_size`, as `tf.nn.compute_average_loss`. The sum over the replicas, of losses as of
    gradients, equals the mean that one device would compute, even if some replicas have fewer
    examples. So sum the gradients, and do not divide by the number of replicas.

    Args:
        per_example: Losses of this replica's examples, of shape `(examples,)`; or `(examples, ...)`
            if an example has several, of which the mean is taken.
        global_batch_size: Examples of the complete batch. None counts those on all replicas, so
            that a smaller last batch is exact too.
        sample_weight: Weights of shape `(examples,)` or of `per_example`'s shape. They do not
            change the divisor.

    Returns:
        A scalar of `per_example`'s dtype; zero on a replica without examples.

    Raises:
        ValueError: `per_example` is a scalar, so a mean was taken already, or
            `global_batch_size` is not a positive integer.

    >>> import tensorflow as tf
    >>> float(global_mean_loss(tf.constant([1.0, 3.0])))
    2.0
    >>> float(global_mean_loss(tf.constant([1.0, 3.0]), global_batch_size=8))
    0.5
    >>> float(global_mean_loss(tf.constant([1.0, 3.0]), sample_weight=[0.0, 1.0]))
    1.5
    """
    losses = tf.convert_to_tensor(per_example)
    if losses.shape.rank == 0:
        checks.fail(
            "`per_example` must hold one loss for each example; use `reduction=None` in the "
            "loss, so that the mean is taken here.",
            per_example=per_example,
        )
    if sample_weight is not None:
        weight = tf.cast(sample_weight, losses.dtype)
        further_axes = tf.ones(losses.shape.rank - weight.shape.rank, tf.int32)
        losses *= tf.reshape(weight, tf.concat([tf.shape(weight), further_axes], axis=0))
    if global_batch_size is None:
        global_batch_size, context = tf.shape(losses)[0], tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            # Not `context.all_reduce`, which would launch one NCCL collective for each loss.
            global_batch_size = context.merge_call(_sum, args=(global_batch_size,))
    elif not tf.is_tensor(global_batch_size):
        global_batch_size = checks.integer("global_batch_size", global_batch_size)
    losses_per_example = tf.reduce_prod(tf.shape(losses)[1:])
    wide = losses.dtype if losses.dtype.size >= 4 else tf.float32  # bfloat16 counts only to 256.
    total = tf.reduce_sum(tf.cast(losses, wide))
    divisor = tf.cast(global_batch_size * losses_per_example, wide)
    return tf.cast(tf.math.divide_no_nan(total, divisor), losses.dtype)


def _sum(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
