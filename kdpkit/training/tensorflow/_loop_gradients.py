"""Losses and gradients of a step, of all examples of a batch or of some."""

from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask
from kdpkit.training._objective import Sums
from kdpkit.training.tensorflow._gradients import dense_if_unique
from kdpkit.training.tensorflow._micro_batches import add


def forward(loop: Any, batch: Any, counts: tuple[Any, Any], *, training: bool) -> tuple[Sums, Any]:
    """Compute losses and predictions of so many examples, of so many in the global batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loop.loss.in_parts = training and loop.accumulation > 1
    losses, predictions = loop.per_example_loss(x, y, training=training)
    terms = loop.loss.terms(losses, predictions, sample_weight)
    return loop.loss.sums(terms, loop.model.losses, counts), predictions


def forward_and_backward(loop: Any, batch: Any, counts: tuple[Any, Any]) -> tuple[Sums, Any, Any]:
    """Compute losses and gradients of some examples, the predictions, and their Keras masks."""
    # The tape is persistent for the losses whose divisors differ.
    with tf.GradientTape(persistent=True) as tape:
        sums, predictions = forward(loop, batch, counts, training=True)
        losses = [*map(loop.optimizer.scale_loss, loop.loss.parts(sums))]
    variables = loop.model.trainable_variables
    gradients = [
        {
            i: dense_if_unique(x)
            for i, x in enumerate(tape.gradient(loss, variables))
            if x is not None
        }
        for loss in losses
    ]
    # Masks are attributes of tensors, which do not cross the border of a `tf.function`.
    masks = keras.tree.map_structure(get_keras_mask, predictions)
    return sums._replace(gradients=gradients), predictions, masks


def combined(gradients: list[dict[int, Any]], factors: list[Any]) -> dict[int, Any]:
    """Add to the first gradients those of other losses, each times a factor; return the first."""
    total, *others = gradients
    for gradients_of_loss, factor in zip(others, factors, strict=True):
        for index, gradient in gradients_of_loss.items():
            scaled = tf.math.scalar_mul(tf.cast(factor, gradient.dtype), gradient)
            total[index] = add(total[index], scaled) if index in total else scaled
    return total
