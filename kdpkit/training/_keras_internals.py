"""All private parts of Keras that training uses on every backend."""

from typing import Any

import keras
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend import get_stateless_scope as get_stateless_scope
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask


def last_operation(model: keras.Model) -> Any:
    """Return the layer or operation that computes the only output of a functional model."""
    outputs: Any = getattr(model, "outputs", None) or []
    return outputs[0]._keras_history.operation if len(outputs) == 1 else None


def build_metrics(model: keras.Model, y_true: Any, y_pred: Any) -> None:
    """Build a model's metrics for predictions of a shape, if they are not."""
    metrics: Any = model._compile_metrics
    if metrics is not None and not metrics.built:
        metrics.build(y_true, y_pred)
