"""Correct gradients of embeddings on a mesh of two axes, whose devices share a model.

XLA pads a batch that the devices do not divide. On a mesh of two axes it wrongly adds the gradient
of the padding to a row of an embedding's table.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from keras.src.backend.jax import numpy as keras_numpy

from kdpkit._internal.shards import batch_shards, wrap_once

_current = threading.local()


@contextlib.contextmanager
def without_padding(mesh: Mesh) -> Iterator[None]:
    """Have lookups that this thread traces ignore padding, if a mesh has several axes."""
    # docs/upstream/xla_adds_up_padding.md
    is_needed = 1 < batch_shards(mesh) < mesh.size
    if is_needed:
        wrap_once(keras_numpy, "take", _ignoring_padding, "x", "indices", "axis")
    before, _current.count = getattr(_current, "count", 1), batch_shards(mesh) if is_needed else 1
    try:
        yield
    finally:
        _current.count = before


def _ignoring_padding(take: Callable) -> Callable:  # Keras' embeddings use it.
    def wrapped(x: Any, indices: Any, axis: int | None = None, **settings: Any) -> Any:
        taken = take(x, indices, axis, **settings)
        is_uneven = bool(taken.ndim) and taken.shape[0] % getattr(_current, "count", 1)
        return _with_masked_gradient(taken) if is_uneven and axis == 0 else taken

    return wrapped


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _with_masked_gradient(taken: jax.Array) -> jax.Array:
    """Return an array whose gradient is zero in the padding of XLA, after its last entry."""
    return taken


def _forward(taken: jax.Array) -> tuple[jax.Array, None]:
    return taken, None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The barrier hides the number from XLA, which would otherwise remove the comparison.
    size = jax.lax.optimization_barrier(jnp.int32(gradient.shape[0]))
    position = jax.lax.broadcasted_iota(jnp.int32, gradient.shape, 0)
    return (jnp.where(position < size, gradient, 0),)


_with_masked_gradient.defvjp(_forward, _backward)
