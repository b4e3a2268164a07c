"""The nodes of a new graph, with the numbers and shapes that many of them use.

Names end with ":0", or another output's number, where a tensor is meant.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import attr_value_pb2, graph_pb2

CPU = "/device:CPU:0"  # of shapes, and of the numbers of examples
_INT32, _INT64 = {"T": tf.int32}, {"T": tf.int64}


class Nodes:
    """Adds nodes to a graph; what is computed of the same numbers is added once."""

    def __init__(self, versions: Any) -> None:
        self.graph_def = graph_pb2.GraphDef(versions=versions)
        self._known: dict[Any, str] = {}

    def add(
        self, name: str, kind: str, inputs: Sequence[str], device: str, **attributes: Any
    ) -> str:
        """Add a node, and return the name of its first output."""
        node = self.graph_def.node.add(name=name, op=kind, input=inputs, device=device)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(_attribute(value))
        return f"{name}:0"

    def once(self, kind: str, inputs: Sequence[str], device: str = CPU, **attributes: Any) -> str:
        """Add a node, or return the one that computes the same of the same."""
        key = (kind, *inputs, device, *attributes.items())
        if key not in self._known:
            name = f"numbers/{len(self._known)}"
            self._known[key] = self.add(name, kind, inputs, device, **attributes)
        return self._known[key]

    def constant(self, value: Any, dtype: Any = np.int32) -> str:
        array = np.asarray(value, dtype)
        key = ("constant", array.dtype, array.shape, array.tobytes())
        if key not in self._known:
            name = f"numbers/{len(self._known)}"
            attributes = {"dtype": tf.as_dtype(array.dtype), "value": array}
            self._known[key] = self.add(name, "Const", [], CPU, **attributes)
        return self._known[key]

    def cast(self, tensor: str, before: tf.DType, after: tf.DType, device: str = CPU) -> str:
        if before == after:
            return tensor
        return self.once("Cast", [tensor], device, SrcT=before, DstT=after, Truncate=False)

    def product(self, *numbers: str) -> str:
        return self.once("Mul", numbers, **_INT32)

    def packed(self, numbers: Sequence[str], dtype: tf.DType = tf.int32) -> str:
        return self.once("Pack", numbers, T=dtype, N=len(numbers), axis=0)

    def quotient(self, entries: str, num_examples: str) -> str:
        """Return how many entries each example has; an empty batch has none."""
        divisor = self.once("Maximum", [num_examples, self.constant(1)], **_INT32)
        return self.once("FloorDiv", [entries, divisor], **_INT32)

    def vector(self, rank: int, axis: int, number: str, other: int) -> str:
        """Return a vector of one number for an axis, and another for all others."""
        numbers = [self.constant(other)] * rank
        numbers[axis] = number
        return self.packed(numbers)

    def shape(self, tensor: str, dtype: tf.DType) -> str:
        return self.once("Shape", [tensor], "", T=dtype, out_type=tf.int32)

    def entry(self, shape: str, axis: int) -> str:
        """Return one length of a shape, as a number."""
        part = self._slice(shape, axis, 1)
        return self.once("Reshape", [part, self.constant([])], Tshape=tf.int32, **_INT32)

    def with_entry(self, shape: str, axis: int, times: str, per: str) -> str:
        """Return a shape of which one length counts other examples; one that is -1 stays."""
        each = self.quotient(self._slice(shape, axis, 1), per)
        length = self.once("Maximum", [self.product(each, times), self.constant(-1)], **_INT32)
        parts = [self._slice(shape, 0, axis), length, self._slice(shape, axis + 1, -1)]
        inputs = [*parts, self.constant(0)]
        return self.once("ConcatV2", inputs, T=tf.int32, Tidx=tf.int32, N=3)

    def num_entries(self, shape: str) -> str:
        """Return the product of a shape's lengths, as an int64."""
        lengths = self.cast(shape, tf.int32, tf.int64)
        axes = self.constant([0])
        return self.once("Prod", [lengths, axes], T=tf.int64, Tidx=tf.int32, keep_dims=False)

    def of_int64(self, kind: str, *numbers: str) -> str:
        return self.once(kind, numbers, **_INT64)

    def _slice(self, vector: str, begin: int, size: int) -> str:
        inputs = [vector, self.constant([begin]), self.constant([size])]
        return self.once("Slice", inputs, T=tf.int32, Index=tf.int32)


def _attribute(value: Any) -> Any:
    if isinstance(value, tf.DType):
        return attr_value_pb2.AttrValue(type=value.as_datatype_enum)
    if isinstance(value, bool):
        return attr_value_pb2.AttrValue(b=value)
    if isinstance(value, int):
        return attr_value_pb2.AttrValue(i=value)
    if isinstance(value, str):
        return attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=value))
    if isinstance(value, list):
        types = [dtype.as_datatype_enum for dtype in value]
        return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(type=types))
    return attr_value_pb2.AttrValue(tensor=tf.make_tensor_proto(value))
