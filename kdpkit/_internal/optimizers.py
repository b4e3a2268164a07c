"""Optimizers that work with another one."""

import keras
from keras.optimizers import Optimizer


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
