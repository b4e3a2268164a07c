"""Optimizers as their users made them, behind what Keras puts around them."""

from typing import Any

import keras


def unscaled(optimizer: Any) -> Any:
    """Give the optimizer that a `LossScaleOptimizer` works with; any other as it is.

    Keras puts that one around another in mixed_float16, and its own rate, step count and settings
    are dummies. An attribute `inner_optimizer` of anything else means what its author meant.

    >>> unscaled(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))).name
    'sgd'
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer
