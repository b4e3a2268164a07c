"""Outputs that are not what the cross-entropy of a model takes, computed for a few examples."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._doctor import arrays, operations

_EXAMPLES = 4
_ERROR = 0.02  # of a sum of probabilities in 16 bits
_PROBABILITIES = ("softmax", "sigmoid")
_REMEDY = (
    "End the model with one output and `sigmoid` for two classes or several labels, one for each "
    "class and `softmax` for others; or with no activation, and `from_logits=True` in the loss."
)
_OTHERS = ("relu", "relu6", "tanh", "linear")  # activations that are none


def findings(model: Any, batch: Any) -> Iterator[Finding]:
    """Yield outputs that a loss of Keras does not take; the model is built and compiled."""
    if not any(map(_is_cross_entropy, keras.tree.flatten(model.loss))):
        return
    x = keras.utils.unpack_x_y_sample_weight(operations.as_fit_passes_it(model, batch))[0]
    is_fixed = any(each.shape[0] for each in getattr(model, "inputs", None) or ())
    x = x if is_fixed else keras.tree.map_structure(lambda part: part[:_EXAMPLES], x)
    outputs = keras.tree.flatten(model(x, training=False))
    names, losses = getattr(model, "output_names", None) or [model.name], model.loss
    if isinstance(losses, dict):
        # A subclass has the names of its dictionary of outputs, which Keras sorts.
        names = names if {*losses} <= {*names} else sorted(losses)
        losses = [losses.get(name) for name in names]
    losses = losses if isinstance(losses, list | tuple) else [losses]
    symbolic = keras.tree.flatten(getattr(model, "outputs", None) or [None] * len(outputs))
    for name, loss, output, symbol in zip(names, losses, outputs, symbolic, strict=False):
        if _is_cross_entropy(loss):
            values = keras.ops.convert_to_numpy(keras.ops.cast(output, "float32"))
            values = np.moveaxis(values, getattr(loss, "axis", -1), -1)  # the classes
            is_logits = getattr(loss, "from_logits", False)
            problem = _problem(arrays.kind_of(loss), is_logits, values, _activation(symbol, output))
            if problem:
                yield Finding("outputs", "wrong", f"{model.name}: {name}", problem, _REMEDY)


def _is_cross_entropy(loss: Any) -> bool:
    return arrays.is_of_keras(loss) and arrays.kind_of(loss).endswith("crossentropy")


def _problem(kind: str, is_logits: bool, values: np.ndarray, activation: str) -> str | None:
    is_binary, sums = kind.startswith("binary"), values.sum(axis=-1)
    least, most = float(values.min(initial=0)), float(values.max(initial=0))
    in_range = least >= -_ERROR and most <= 1 + _ERROR
    adds_up = is_binary or bool(np.all(np.abs(sums - 1) <= _ERROR))
    if values.shape[-1] == 1 and (not is_binary or (values == 1).all()):
        return "It has one output, and a softmax or cross-entropy of one class is constant."
    if is_logits and (activation in _PROBABILITIES or (in_range and adds_up and not is_binary)):
        return "The loss takes logits, and gets probabilities, which it takes for logits."
    if is_logits and activation in _OTHERS[:-1]:
        return f"The loss takes logits, and `{activation}` cuts them off."
    if not is_logits and (activation in _OTHERS or not (in_range and adds_up)):
        problem = f"The loss takes probabilities, and gets {least:.3g} to {most:.3g}"
        return f"{problem}." if is_binary else f"{problem}, whose sum is not 1."
    return None


def _activation(symbol: Any, output: Any) -> str:
    """Return the last activation, by the layer or by what Keras notes on TensorFlow."""
    layer = getattr(getattr(symbol, "_keras_history", None), "operation", None)
    name = getattr(getattr(layer, "activation", None), "__name__", type(layer).__name__.lower())
    return "sigmoid" if hasattr(output, "_keras_logits") else name
