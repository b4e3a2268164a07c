"""Variables of TensorFlow that layers hold as attributes, which Keras does not list."""

from collections.abc import Iterator, ValuesView
from typing import Any

import keras
import tensorflow as tf


def variables_in_attributes(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Return the variables of TensorFlow that layers hold, and what they are called there."""
    for layer in model._flatten_layers():
        for name, value in vars(layer).items():
            held = value.values() if isinstance(value, dict) else value
            for part in held if isinstance(held, list | tuple | ValuesView) else [value]:
                if isinstance(part, tf.Variable):
                    yield f"{layer.name}.{name}", part


class HeldVariable:
    """A variable of TensorFlow, with the attributes of a Keras variable that states need.

    Args:
        path: What it is called.
        value: The variable.
    """

    def __init__(self, path: str, value: tf.Variable) -> None:
        self.path = path
        self.value = value
        self.shape = value.shape

    def assign(self, value: Any) -> None:
        """Set its value, on all replicas."""
        self.value.assign(value)


def of_model(model: keras.Model) -> list[HeldVariable]:
    """Return the variables that layers hold, each once."""
    found = {id(value): HeldVariable(path, value) for path, value in variables_in_attributes(model)}
    return [*found.values()]
