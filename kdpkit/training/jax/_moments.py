"""Variances whose gradient reads the input once less.

The gradient of a variance by way of the mean is zero, but XLA computes it: one more pass over every
activation that a BatchNormalization sees.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from keras.src.backend.jax import nn as keras_nn

from kdpkit._internal.shards import wrap_once

_current = threading.local()


@contextlib.contextmanager
def of_constant_means() -> Iterator[None]:
    """Have the variances that this thread traces take their mean as a constant."""
    wrap_once(keras_nn, "moments", _with_constant_mean, "x", "axes", "keepdims", "synchronized")
    before, _current.is_on = getattr(_current, "is_on", False), True
    try:
        yield
    finally:
        _current.is_on = before


def _with_constant_mean(moments: Callable) -> Callable:
    def wrapped(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        is_wide = getattr(x, "dtype", None) == jnp.float32  # Keras limits those of 16 bits.
        if synchronized or not is_wide or not getattr(_current, "is_on", False):
            return moments(x, axes, keepdims, synchronized)
        mean = jnp.mean(x, axes, keepdims=True)
        variance = jnp.mean(jnp.square(x - jax.lax.stop_gradient(mean)), axes, keepdims=True)
        if keepdims:
            return mean, variance
        return jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)

    return wrapped
