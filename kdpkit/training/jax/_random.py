"""Random numbers of a micro-batch on JAX: those that its examples have in the global batch.

While a micro-batch is traced, Keras' random functions draw for the global batch, and return the
part of the micro-batch. XLA can fuse the two, and then computes only this part.
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

from kdpkit._internal.shards import wrap_once

_SHAPE_FIRST = ("normal", "uniform", "truncated_normal", "randint")


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Every `count`-th example of the global batch, so that all devices have some of them.

    Args:
        index: The number of the micro-batch, from 0, which is its first example; in a loop of XLA a
            tensor, and then all micro-batches have equally many examples.
        count: The number of micro-batches.
        num_examples: The number of examples in the global batch.
    """

    index: Any
    count: int
    num_examples: int

    @property
    def size(self) -> int:
        if isinstance(self.index, int):
            return len(range(self.index, self.num_examples, self.count))
        return self.num_examples // self.count

    def take_from(self, array: jax.Array) -> jax.Array:
        """Return the entries of its examples from an array over those of the global batch."""
        if not isinstance(self.index, int):
            parts = array.reshape(self.size, self.count, *array.shape[1:])
            return jax.lax.dynamic_index_in_dim(parts, self.index, axis=1, keepdims=False)
        if self.count == self.num_examples:
            # A single example is taken without a step: docs/upstream/xla_takes_other_rows.md
            return array[self.index : self.index + 1]
        return array[self.index :: self.count]


_current = threading.local()


@contextlib.contextmanager
def by_position(micro_batch: MicroBatch) -> Iterator[None]:
    """Have random functions in this thread return a micro-batch's part of the numbers."""
    for name in (*_SHAPE_FIRST, "dropout"):
        draw = _dropout if name == "dropout" else _random_numbers
        wrap_once(keras_random, name, functools.partial(_wrapped, draw))
    _current.micro_batch = micro_batch
    try:
        yield
    finally:
        _current.micro_batch = None


def _wrapped(draw: Callable, original: Callable) -> Callable:
    signature = inspect.signature(original)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        micro_batch = getattr(_current, "micro_batch", None)
        if micro_batch is None:
            return original(*args, **kwargs)
        return draw(original, micro_batch, **signature.bind(*args, **kwargs).arguments)

    return wrapped


def _random_numbers(
    original: Callable, micro_batch: MicroBatch, shape: Any, seed: Any = None, **settings: Any
) -> Any:
    """Draw numbers; a shape whose first axis is not the examples is drawn as it is."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    has_arrays = any(getattr(value, "shape", ()) for value in settings.values())
    if shape[:1] != (micro_batch.size,) or has_arrays:
        return original(shape, seed=seed, **settings)
    global_shape = (micro_batch.num_examples, *shape[1:])
    return micro_batch.take_from(original(global_shape, seed=seed, **settings))


def _dropout(
    original: Callable,
    micro_batch: MicroBatch,
    inputs: jax.Array,
    rate: Any,
    noise_shape: Any = None,
    seed: Any = None,
) -> jax.Array:
    """Drop what dropout of the global batch drops; an example may have several entries."""
    pairs = zip(noise_shape or inputs.shape, inputs.shape, strict=True)
    shape = [input_size if size is None else size for size, input_size in pairs]
    entries_per_example, rest = divmod(shape[0], micro_batch.size)
    if rate in (0.0, 1.0) or rest:
        return original(inputs, rate, noise_shape, seed)
    ones = jnp.ones((micro_batch.num_examples * entries_per_example, *shape[1:]), inputs.dtype)
    dropped = original(ones, rate, None, seed).reshape(-1, entries_per_example, *shape[1:])
    is_kept = micro_batch.take_from(dropped).reshape(shape) != 0
    return jnp.where(is_kept, inputs / (1.0 - rate), jnp.zeros_like(inputs))
