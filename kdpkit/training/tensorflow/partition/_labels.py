"""What devices can have of a tensor, and an operation as its rule sees it."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Label(enum.Enum):
    """What devices have of a tensor, if it is neither divided nor a list.

    What is `SAME` may be computed of all examples, as the mean of a batch is: the first device then
    computes it, and others get copies.
    """

    SAME = "all of it, which does not depend on the batch's length"
    SIZE = "a number or a shape that counts examples"
    PARTIAL = "a term of a sum over the devices"
    WHOLE = "all of it, on the first device"
    NEW_LIST = "a list without entries yet"


class Split(NamedTuple):
    """A part of the tensor: of an axis, at the examples of each device."""

    axis: int


class ShapeOf(NamedTuple):
    """The shape of what is split along an axis."""

    axis: int


class ListOf(NamedTuple):
    """A list of tensors of which devices have the same."""

    label: Any


SAME, SIZE, PARTIAL, WHOLE, NEW_LIST = Label


def is_list(label: Any) -> bool:
    return label is NEW_LIST or isinstance(label, ListOf)


def is_size(label: Any) -> bool:
    return label is SIZE or isinstance(label, ShapeOf)


def is_divided(label: Any) -> bool:
    """Return whether each device has something of its own."""
    return label is PARTIAL or isinstance(label, Split) or is_list(label)


class Operation:
    """An operation, as its rule sees it: with the labels, lengths and values of its inputs."""

    def __init__(self, op: tf.Operation, labels: Sequence[Any], graph: Any) -> None:
        self.op, self.labels, self.graph = op, labels, graph
        self.kind, self.inputs, self.outputs = op.type, op.inputs, op.outputs

    def rank(self, index: int = 0) -> int | None:
        return self.inputs[index].shape.rank

    def shape(self, index: int = 0) -> list[int | None]:
        return [*self.inputs[index].shape]

    def value(self, index: int) -> Any:
        """Return an input that is known before the step runs, as an array; else None."""
        x = self.inputs[index]
        return known(x) if x.name in self.graph.without_batch else None

    def attr(self, name: str) -> Any:
        return self.op.get_attr(name)

    def axis_of_output(self, index: int = 0) -> int | None:
        return self.graph.axes.get(self.outputs[index].name)

    @property
    def splits(self) -> list[Split]:
        return [label for label in self.labels if isinstance(label, Split)]

    def are_same(self, *indices: int) -> bool:
        """Return whether inputs are the same on all devices."""
        return all(self.labels[i] is SAME for i in indices)


# `tf.get_static_value` computes no differences, as of the axes of `tf.nn.softmax`.
_COMPUTED: dict[str, Callable[..., Any]] = {
    "Sub": np.subtract,
    "AddV2": np.add,
    "Range": np.arange,
    "Pack": lambda *numbers: np.stack(numbers),
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1]),
}


def known(x: tf.Tensor) -> Any:
    value, op = tf.get_static_value(x), x.op
    if value is not None or op.type not in _COMPUTED or x.shape.rank not in (0, 1):
        return value
    values = [known(y) for y in op.inputs]
    return None if any(y is None for y in values) else _COMPUTED[op.type](*values)


def static_axis(value: Any, rank: int | None) -> int | None:
    """Return a constant axis, counted from the first one."""
    if value is None or rank is None:
        return None
    return int(np.ravel(value)[0]) % rank
