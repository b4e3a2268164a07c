"""Forward and backward pass over one replica's examples, whole or in micro-batches.

The parts that replicas and micro-batches compute add up to the loss of the global batch and to its
gradients. Nothing here meets another replica, so that XLA can compile it and a loop can hold it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask
from kdpkit.training._objective import Sums
from kdpkit.training.tensorflow import _distribution
from kdpkit.training.tensorflow._step import ReplicaStep, dense_if_unique, map_values, running

T = TypeVar("T")  # `Sums`, or several things that add up


def forward(loop: Any, step: ReplicaStep, batch: Any, *, training: bool) -> tuple[Sums, Any]:
    """Compute losses of some of the replica's examples, and the predictions; no gradients yet."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loop.loss.in_parts = step.own is None and (step.replicas > 1 or loop.accumulation > 1)
    with running(step):
        losses, predictions = loop.per_example_loss(x, y, training=training)
        added = loop.model.losses
    terms = loop.loss.terms(losses, predictions, sample_weight)
    copies = 1 if step.own is None else step.replicas
    counts = tf.shape(keras.tree.flatten(losses)[0])[0], step.num_global_examples
    return loop.loss.sums(terms, added, counts, copies), predictions


def forward_and_backward(loop: Any, step: ReplicaStep, batch: Any) -> tuple[Sums, Any, Any]:
    """Compute losses and gradients of some examples, the predictions, and their Keras masks."""
    # Persistent, for the losses whose divisors differ; a graph keeps nothing longer for it.
    with tf.GradientTape(persistent=True) as tape:
        sums, predictions = forward(loop, step, batch, training=True)
        parts = [*map(loop.optimizer.scale_loss, loop.loss.parts(sums))]
    variables = loop.model.trainable_variables
    gradients = [_present(tape.gradient(part, variables)) for part in parts]
    # An attribute of a tensor does not pass the border of a `tf.function`.
    masks = keras.tree.map_structure(get_keras_mask, predictions)
    return sums._replace(gradients=gradients), predictions, masks


def over_micro_batches(
    compute: Callable[[Any, Any], T], batch: Any, *, num_examples: tf.Tensor, micro_batches: int
) -> T:
    """Add up what the micro-batches of a batch give, one after the other; none is empty.

    Args:
        compute: Computes a micro-batch, given where in the batch it starts.
        batch: The batch.
        num_examples: Its examples.
        micro_batches: How many to split into.
    """
    if micro_batches == 1:
        return compute(batch, 0)
    count = tf.minimum(micro_batches, tf.maximum(num_examples, 1))

    def body(index: Any, sums: T) -> tuple[Any, T]:
        more = compute(
            _micro_batch(batch, index, count, num_examples, micro_batches),
            num_examples * index // count,
        )
        return index + 1, tf.nest.map_structure(_add, sums, more)

    first = compute(_micro_batch(batch, 0, count, num_examples, micro_batches), 0)
    _, sums = tf.while_loop(
        lambda index, _: index < count,
        body,
        (tf.constant(1), first),
        shape_invariants=(tf.TensorSpec((), tf.int32), tf.nest.map_structure(_spec_of_sum, first)),
        parallel_iterations=1,  # else several micro-batches would be in memory
    )
    return sums


def combined(gradients: list[dict[int, Any]], factors: list[Any]) -> dict[int, Any]:
    """Add up the gradients of several losses, each times its factor."""
    total: dict[int, Any] = {}
    for of_loss, factor in zip(gradients, factors, strict=True):

        def times(values: tf.Tensor, factor: Any = factor) -> tf.Tensor:
            return values * tf.cast(factor, values.dtype)

        for index, gradient in of_loss.items():
            scaled = map_values(times, gradient)
            total[index] = _add(total[index], scaled) if index in total else scaled
    return dict(sorted(total.items()))


def _micro_batch(
    batch: Any, index: Any, count: Any, num_examples: tf.Tensor, micro_batches: int
) -> Any:
    """Return a micro-batch of a batch; their sizes differ by one example at most."""
    start, stop = (num_examples * i // count for i in (index, index + 1))

    def cut(part: Any) -> Any:
        if part is None:
            return None
        micro_batch, known = _distribution.sliced(part, start, stop), part.shape[0]
        is_dense = isinstance(part, tf.Tensor)
        if is_dense and known is not None and known % micro_batches == 0:
            micro_batch.set_shape([known // micro_batches, *part.shape[1:]])  # XLA compiles it once
        return micro_batch

    return tf.nest.map_structure(cut, batch)


def _present(gradients: list[Any]) -> dict[int, Any]:
    return {
        i: dense_if_unique(gradient) for i, gradient in enumerate(gradients) if gradient is not None
    }


def _add(one: Any, other: Any) -> Any:
    """Add up gradients; sparse ones stay so, because optimizers treat them in their own way."""
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], axis=0),
            tf.concat([one.indices, other.indices], axis=0),
            one.dense_shape,
        )
    return tf.add_n([one, other])


def _spec_of_sum(value: Any) -> Any:
    """Return the type of a sum: in a sparse one there may be any number of slices."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(
            value.shape, value.dtype, value.indices.dtype, tf.int32, indices_shape=[None]
        )
    return tf.TensorSpec(value.shape, value.dtype)
