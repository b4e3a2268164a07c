"""How exactly a model computes, and its weights changed by as much."""

import keras
import numpy as np

FLOAT32_EPSILON = 2.0**-23
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def nudge_weights(model: keras.Model) -> None:
    """Change every weight by about the rounding of the type that the model computes in.

    What a step then gives differently is rounding, however much of it there is.
    """
    epsilon = max(
        _EPSILONS.get(layer.compute_dtype, FLOAT32_EPSILON) for layer in model._flatten_layers()
    )
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = np.max(np.abs(value), initial=0.0) or 1.0
        nudge = epsilon * float(size) * random.standard_normal(value.shape)
        weight.assign((value + nudge).astype(value.dtype))
