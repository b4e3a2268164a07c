"""Optimizers that work with another one."""

import keras
from keras.optimizers import Optimizer


def unscaled(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a `LossScaleOptimizer` updates variables with; any other as it is.

    Keras puts that one around another in mixed_float16. An attribute `inner_optimizer` of a user's
    own optimizer may mean something else.

    >>> inner = keras.optimizers.SGD(0.1)
    >>> unscaled(keras.optimizers.LossScaleOptimizer(inner)) is inner
    True
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def wrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose settings count: the one in the attribute `inner_optimizer`, if any.

    The rate and the clipping that a `LossScaleOptimizer` has of its own are dummies, and a user who
    puts an optimizer around another names it as Keras does.

    >>> inner = keras.optimizers.SGD(0.1)
    >>> wrapped(keras.optimizers.LossScaleOptimizer(inner)) is wrapped(inner) is inner
    True
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer
