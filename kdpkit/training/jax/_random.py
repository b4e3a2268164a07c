"""Random numbers of a micro-batch on JAX: those that its examples have in the global batch.

While a micro-batch is traced, Keras' random functions draw for the global batch, and take the part
of its examples. XLA computes no more numbers than that part has, where it fuses the two.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from keras.src.backend.jax import random as keras_random

from kdpkit._internal import versions

_SHAPE_FIRST = ("normal", "uniform", "truncated_normal", "randint")


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Every `count`-th example of a batch, so that every device has some of each micro-batch."""

    index: Any  # the first of them; in a loop of XLA a tensor
    count: int  # of micro-batches
    num_examples: int  # of the global batch

    @property
    def size(self) -> int:
        """How many examples the micro-batch has; in a loop of XLA all have equally many."""
        if isinstance(self.index, int):
            return len(range(self.index, self.num_examples, self.count))
        return self.num_examples // self.count

    def of(self, whole: jax.Array) -> jax.Array:
        """Take its part of an array over the examples of the global batch."""
        if not isinstance(self.index, int):
            parts = whole.reshape(self.size, self.count, *whole.shape[1:])
            return jax.lax.dynamic_index_in_dim(parts, self.index, axis=1, keepdims=False)
        if self.count == self.num_examples:
            # Of a single example without a step: docs/upstream/xla_takes_other_rows.md
            return whole[self.index : self.index + 1]
        return whole[self.index :: self.count]


_current = threading.local()


@contextlib.contextmanager
def by_position(micro_batch: MicroBatch) -> Iterator[None]:
    """Draw, in this thread, what a micro-batch has of the numbers of the global batch."""
    _install()
    _current.micro_batch = micro_batch
    try:
        yield
    finally:
        _current.micro_batch = None


def _install() -> None:
    """Wrap Keras' random functions, once."""
    for name in (*_SHAPE_FIRST, "dropout"):
        original = getattr(keras_random, name, None)
        if original is None:
            versions.reject_unknown(f"keras.random.{name}", jax=jax.__version__)
        if not hasattr(original, "kdpkit_wrapper"):
            wrapper = _dropout if name == "dropout" else _of_shape
            setattr(keras_random, name, _wrapped(original, wrapper))


def _wrapped(original: Any, wrapper: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        micro_batch = getattr(_current, "micro_batch", None)
        if micro_batch is None:
            return original(*args, **kwargs)
        return wrapper(original, micro_batch, **signature.bind(*args, **kwargs).arguments)

    wrapped.kdpkit_wrapper = wrapper  # type: ignore[attr-defined]  # marks what is wrapped already
    return wrapped


def _of_shape(
    original: Callable, micro_batch: MicroBatch, shape: Any, seed: Any = None, **settings: Any
) -> Any:
    """Draw numbers of a shape; what has another first axis than the examples is drawn as it is."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    is_of_each = any(getattr(value, "shape", ()) for value in settings.values())
    if shape[:1] != (micro_batch.size,) or is_of_each:
        return original(shape, seed=seed, **settings)
    whole = (micro_batch.num_examples, *shape[1:])
    return micro_batch.of(original(whole, seed=seed, **settings))


def _dropout(
    original: Callable,
    micro_batch: MicroBatch,
    inputs: jax.Array,
    rate: Any,
    noise_shape: Any = None,
    seed: Any = None,
) -> jax.Array:
    """Drop what dropout over the global batch drops; an example may have several entries."""
    noise = inputs.shape if noise_shape is None else noise_shape
    pairs = zip(noise, inputs.shape, strict=True)
    noise = [size if wanted is None else wanted for wanted, size in pairs]
    of_each, rest = divmod(noise[0], micro_batch.size)
    if rate in (0.0, 1.0) or rest:
        return original(inputs, rate, noise_shape, seed)
    ones = jnp.ones((micro_batch.num_examples * of_each, *noise[1:]), inputs.dtype)
    whole = original(ones, rate, None, seed).reshape(-1, of_each, *noise[1:])
    kept = micro_batch.of(whole).reshape(noise) != 0
    return jnp.where(kept, inputs / (1.0 - rate), jnp.zeros_like(inputs))
