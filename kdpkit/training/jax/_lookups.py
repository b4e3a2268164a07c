"""Lookups in tables, where devices share a model: gradients without what XLA pads a batch with.

XLA pads examples that the devices do not divide. On a mesh of several axes it forgets that in the
gradient of a lookup, and adds the padding's gradient to a row of the table, in silence.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from keras.src.backend.jax import numpy as keras_numpy

from kdpkit._internal import versions
from kdpkit._internal.shards import batch_shards

_current = threading.local()


@contextlib.contextmanager
def without_padding(mesh: Mesh) -> Iterator[None]:
    """Have lookups that this thread traces leave out padding, if a mesh has several axes."""
    # docs/upstream/xla_adds_up_padding.md
    is_needed = 1 < batch_shards(mesh) < mesh.size
    if is_needed:
        _install()
    before, _current.count = getattr(_current, "count", 1), batch_shards(mesh) if is_needed else 1
    try:
        yield
    finally:
        _current.count = before


def _install() -> None:
    """Wrap Keras' `take`, with which its embeddings look up, once."""
    original = keras_numpy.take
    if hasattr(original, "kdpkit_wrapper"):
        return
    if [*inspect.signature(original).parameters] != ["x", "indices", "axis"]:
        versions.reject_unknown("keras.ops.take", jax=jax.__version__)
    keras_numpy.take = _leaving_out_padding(original)


def _leaving_out_padding(take: Callable) -> Callable:
    @functools.wraps(take)
    def wrapped(x: Any, indices: Any, axis: int | None = None) -> Any:
        taken = take(x, indices, axis)
        is_uneven = bool(taken.ndim) and taken.shape[0] % getattr(_current, "count", 1)
        return _with_gradient_of_entries(taken) if is_uneven and axis == 0 else taken

    wrapped.kdpkit_wrapper = True  # type: ignore[attr-defined]
    return wrapped


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _with_gradient_of_entries(taken: jax.Array) -> jax.Array:
    """Return an array whose gradient is zero beyond its last entry, where XLA pads it."""
    return taken


def _forward(taken: jax.Array) -> tuple[jax.Array, None]:
    return taken, None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # XLA does not see the number, and so cannot leave the comparison out.
    size = jax.lax.optimization_barrier(jnp.int32(gradient.shape[0]))
    position = jax.lax.broadcasted_iota(jnp.int32, gradient.shape, 0)
    return (jnp.where(position < size, gradient, 0),)


_with_gradient_of_entries.defvjp(_forward, _backward)
