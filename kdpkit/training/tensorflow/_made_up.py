"""Made-up examples, weights and gradients, with which a layer is tried."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 4
HUGE = 1e30
# Tried in this order until the layer computes finite numbers: lengths of unknown axes, values.
LENGTHS = (6, 32, 128)
VALUES: dict[str, tuple[Callable, int]] = {  # floating ones, and the limit of integers
    "normal": (lambda draw, shape: draw.normal(size=shape), 4),
    "counts": (lambda draw, shape: draw.integers(0, 4, shape), 4),
    "fractions": (lambda draw, shape: draw.uniform(0.1, 0.9, shape), 2),
    "zeros and ones": (lambda draw, shape: draw.integers(0, 2, shape), 2),
}
_TEXTS = ("one", "two words", "and three words", "four words of text")
# What replaces one of the examples.
ANOTHER = "another one"
REPLACEMENTS = {"NaN": np.nan, "huge": HUGE, ANOTHER: 0, "huge and negative": -HUGE}


def made_up(
    tensors: Iterable[tf.Tensor], has_examples: Sequence[bool], kind: str, length: int
) -> list[Any]:
    """Return values of a kind in place of tensors with examples; constants are what they are."""

    def values(of: tf.Tensor, has_examples: bool) -> Any:
        if not has_examples:
            return tf.constant(tf.get_static_value(of), of.dtype)
        shape = [EXAMPLES, *(length if size is None else size for size in of.shape[1:])]
        if of.dtype == tf.string:
            return tf.constant(np.resize(_TEXTS, shape))
        draw, (floats, limit) = np.random.default_rng(0), VALUES[kind]
        is_float = of.dtype.is_floating or of.dtype.is_complex
        return tf.cast(
            floats(draw, shape) if is_float else draw.integers(0, limit, shape), of.dtype
        )

    return [*map(values, tensors, has_examples)]


def taken(values: tf.Tensor, order: list[int], at: int, kind: str) -> Any:
    """Return examples in an order, of which one may be replaced; integers by what others have."""
    array, dtype, by = values.numpy()[order], values.dtype, REPLACEMENTS.get(kind, 0)
    if not kind:
        pass
    elif kind == ANOTHER:
        array[at] = array[at - 1]
    elif dtype == tf.string:
        array[at] = b"a text of more words than any other has"
    elif dtype.is_floating or dtype.is_complex:
        limit = float(dtype.max) / 4 if dtype.is_floating else HUGE
        array[at] = np.clip(by, -limit, limit)
    else:
        array[at] = np.clip(np.nan_to_num(by), np.min(array), np.max(array))
    return tf.constant(array, dtype)


def other_weights(
    variables: Iterable[keras.Variable], state: Iterable[tf.Tensor], factor: float
) -> list[Any]:
    """Return other values of variables: of scales, biases and variances positive ones, times it."""
    draw = np.random.default_rng(1)

    def other(variable: keras.Variable, value: tf.Tensor) -> Any:
        if not value.dtype.is_floating:
            return value
        drawn = draw.uniform(0.5, 1.5, value.shape)
        if value.shape.rank > 1:
            drawn = draw.standard_normal(value.shape, np.float32)
            drawn /= math.sqrt(math.prod(value.shape[:-1]))
        return tf.cast(drawn * (factor if variable.trainable else abs(factor)), value.dtype)

    return [*map(other, variables, state)]


def upstream_of(output: tf.Tensor, weights: tf.Tensor) -> Any:
    """Return the gradient of a loss for an output; each example has a weight in it."""
    shape, limit = tf.shape(output), float(output.dtype.max) / 16
    examples = tf.range(shape[0]) * tf.size(weights) // tf.maximum(shape[0], 1)
    of_each = tf.clip_by_value(tf.gather(weights, examples), -limit, limit)
    of_each = tf.reshape(of_each, tf.concat([shape[:1], tf.ones_like(shape[1:])], 0))
    factors = tf.random.stateless_uniform(shape[1:], [0, 2], -1.0, 1.0)
    return tf.cast(of_each, output.dtype) * tf.cast(factors, output.dtype)
