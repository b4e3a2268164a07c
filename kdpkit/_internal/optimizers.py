"""The optimizers of a model, and those that work with another one."""

from collections.abc import Iterator
from typing import Any

import keras
from keras.optimizers import Optimizer


def all_of(model: keras.Model) -> list[Optimizer]:
    """Return the optimizers in attributes of a model and its layers, each once."""
    attributes = [[*vars(layer).values()] for layer in model._flatten_layers()]
    found = (part for part in _flatten(attributes) if isinstance(part, Optimizer))
    return [*{id(optimizer): optimizer for optimizer in found}.values()]


def _flatten(value: Any) -> Iterator[Any]:
    """Return what is in nested lists, tuples and dicts; `keras.tree` may fail to sort keys."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flatten(part)
    else:
        yield value


def unscaled(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a `LossScaleOptimizer`; any other as it is.

    Keras wraps optimizers like this in mixed_float16.
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def wrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose settings count: the attribute `inner_optimizer`, if there is one.

    The learning rate and the clipping of a `LossScaleOptimizer` itself are unused, and a user who
    wraps an optimizer names the attribute as Keras does.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer
