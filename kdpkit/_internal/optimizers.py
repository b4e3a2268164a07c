"""Optimizers that work with another one."""

from typing import Any

import keras


def unscaled(optimizer: Any) -> Any:
    """Give the optimizer that a `LossScaleOptimizer` updates variables with; any other as it is.

    Keras puts that one around another in mixed_float16. What an optimizer of a user's own does with
    an attribute `inner_optimizer`, nobody knows.

    >>> inner = keras.optimizers.SGD(0.1)
    >>> unscaled(keras.optimizers.LossScaleOptimizer(inner)) is inner
    True
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def wrapped(optimizer: Any) -> Any:
    """Give the optimizer whose settings count: the one in the attribute `inner_optimizer`, if any.

    The rate and the clipping that a `LossScaleOptimizer` has of its own are dummies, and a user who
    puts an optimizer around another names it as Keras does.

    >>> inner = keras.optimizers.SGD(0.1)
    >>> wrapped(keras.optimizers.LossScaleOptimizer(inner)) is wrapped(inner) is inner
    True
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if isinstance(inner, keras.optimizers.Optimizer) else optimizer
