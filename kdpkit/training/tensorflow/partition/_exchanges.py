"""What several processes exchange where a divided step needs all of what is divided.

Every process runs the same step on the same global batch, and its devices compute their parts.
Exchanges come one after another, in the order in which they are written: that of all processes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import exchanged

TURN = "turn:0"  # of a step, which all of its exchanges have


class Exchanges:
    """Writes the calls of functions that exchange tensors.

    Args:
        mesh: The devices of all processes.
        nodes: Where the calls are added.
    """

    def __init__(self, mesh: Any, nodes: Any) -> None:
        self._mesh, self._nodes = mesh, nodes
        self._functions: dict[Any, str] = {}
        self._number = 0  # of the last one; 0 is the comparison of batches

    def summed(self, tensor: str, x: tf.Tensor) -> str:
        """Return the sum of what all processes have."""
        return self._called(functools.partial(summed, self._mesh), ("sum",), x, [tensor])

    def gathered(self, tensor: str, x: tf.Tensor, axis: int, lengths: Sequence[str]) -> str:
        """Return what all processes have, one after the other along an axis.

        The lengths are the most that one of them has, and those of all.
        """
        gather = functools.partial(_gathered, self._mesh, axis)
        return self._called(gather, ("gather", axis), x, [tensor, *lengths])

    def _called(self, function: Callable, key: Any, x: tf.Tensor, inputs: list[str]) -> str:
        self._number += 1
        name, inputs = "exchange/{}".format, [*inputs, self._nodes.constant(self._number), TURN]
        types = [x.dtype, *[tf.int32] * (len(inputs) - 1)]
        key = (*key, x.dtype, x.shape.rank)
        if key not in self._functions:
            specs = [tf.TensorSpec([None] * x.shape.rank, x.dtype)]
            specs += [tf.TensorSpec([], tf.int32)] * (len(inputs) - 1)
            traced = tf.function(function, autograph=False).get_concrete_function(*specs)
            traced.add_to_graph(tf.compat.v1.get_default_graph())
            self._functions[key] = traced.name.decode()
        if self._number > 1:
            inputs.append(f"^{name(self._number - 1)}")
        attributes = {"Tin": types, "Tout": [x.dtype], "f": self._functions[key]}
        device = self._mesh.home
        return self._nodes.add(name(self._number), "PartitionedCall", inputs, device, **attributes)


def summed(mesh: Any, tensor: Any, number: Any, turn: Any) -> Any:
    """Return the sum of a tensor over the processes."""
    vector = exchanged(mesh, tf.reshape(_sendable(tensor), [-1]), "sum", number, turn)
    return tf.cast(tf.reshape(vector, tf.shape(tensor)), tensor.dtype)


def _gathered(
    mesh: Any, axis: int, tensor: Any, size: Any, total: Any, number: Any, turn: Any
) -> Any:
    rank = tensor.shape.rank
    order = [axis, *(i for i in range(rank) if i != axis)]
    entries = tf.transpose(_sendable(tensor), order)
    padded = tf.pad(entries, [[0, size - tf.shape(entries)[0]]] + [[0, 0]] * (rank - 1))
    vectors = exchanged(mesh, tf.reshape(padded, [-1]), "gather", number, turn)
    shape = tf.concat([[mesh.num_processes * size], tf.shape(entries)[1:]], 0)
    entries = tf.cast(tf.reshape(vectors, shape)[:total], tensor.dtype)
    return tf.transpose(entries, [order.index(i) for i in range(rank)])


def _sendable(tensor: Any) -> Any:
    """Return a tensor in one of the few types that processes can send each other."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex:
        return tf.cast(tensor, tf.float32) if dtype.size < tf.float32.size else tensor
    return tf.cast(tensor, tf.int64 if dtype.size >= tf.int32.size else tf.int32)
