"""Variables that layers and losses hold on TensorFlow, and that Keras does not list."""

from collections.abc import Iterable, Iterator, ValuesView
from typing import Any

import keras
import tensorflow as tf


def parts_of_attributes(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Return what is in attributes, also in lists and dicts, with its path: `"dense.kernel"`."""
    for owner in owners:
        for name, value in vars(owner).items():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(parts, list | tuple | ValuesView) else [value]:
                yield f"{owner.name}.{name}", part


class HeldVariable:
    """A variable of TensorFlow, with the attributes of a Keras variable that states need."""

    def __init__(self, path: str, value: tf.Variable) -> None:
        self.path, self.value, self.shape = path, value, value.shape

    def assign(self, value: Any) -> None:
        self.value.assign(value)


def unlisted_variables(model: keras.Model) -> list[HeldVariable]:
    """Return what layers and losses hold and `model.variables` lacks, each once.

    These are variables of TensorFlow, the states of its random generators, those of a recurrent
    layer with `stateful=True`, and Keras variables of a loss.
    """
    listed = {id(variable.value) for variable in model.variables}
    losses = keras.tree.flatten(getattr(model, "loss", None))
    owners = [loss for loss in losses if isinstance(loss, keras.losses.Loss)]
    unlisted = {}
    for path, part in parts_of_attributes([*model._flatten_layers(), *owners]):
        value = part.state if isinstance(part, tf.random.Generator) else part
        value = value.value if isinstance(value, keras.Variable) else value
        if isinstance(value, tf.Variable) and id(value) not in listed:
            unlisted[id(value)] = HeldVariable(path, value)
    return [*unlisted.values()]
