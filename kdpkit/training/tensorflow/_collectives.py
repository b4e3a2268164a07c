"""What several processes exchange at the borders of divided layers; with one process nothing.

Every process traces the same step on the same global batch, and its devices compute their parts of
divided layers. Where parts are joined the processes exchange them. What crosses the border in the
other direction, such as a variable, has a gradient in each process, and these are added up.
"""

from typing import Any

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow._keras_internals import (
    exchanged,
    is_differentiable,
    with_gradient,
)

_FIRST, _SECOND = 8, 4  # numbers for gradients of what is exchanged, and for each one's gradients
NUMBERS = _FIRST * _SECOND  # for what is exchanged at one border, with its gradients


class Channel:
    """The number under which processes exchange what belongs together, with some for gradients.

    All processes trace a step in the same order, but not its gradients: the number of a gradient
    follows from that of what it is the gradient of.
    """

    def __init__(self, number: int, num_numbers: int = NUMBERS) -> None:
        self.number, self._num_numbers, self._num_gradients = number, num_numbers, 0

    def of_gradient(self) -> "Channel":
        """Return a channel for a gradient of what this one is for."""
        self._num_gradients += 1
        width = {NUMBERS: _SECOND, _SECOND: 1}.get(self._num_numbers, 0)
        if not width or self._num_gradients * width >= self._num_numbers:
            checks.fail(
                "A step takes more gradients, or gradients of gradients, than several processes "
                "can keep apart.",
                gradients=self._num_gradients,
                remedy="Train in one process, which takes all devices of its machine.",
            )
        return Channel(self.number + self._num_gradients * width, width)


def gathered(mesh: Any, tensor: Any, size: Any, channel: Channel) -> Any:
    """Return the entries of all processes, one after the other, each padded to a size."""
    if mesh.num_processes == 1:
        return tensor
    paddings = [[0, size - tf.shape(tensor)[0]]] + [[0, 0]] * (tensor.shape.rank - 1)
    vector = tf.reshape(tf.pad(_sendable(tensor), paddings), [-1])
    vectors = exchanged(mesh, vector, "gather", channel.number)
    shape = tf.concat([[mesh.num_processes * size], tf.shape(tensor)[1:]], 0)
    entries = tf.cast(tf.reshape(vectors, shape), tensor.dtype)
    return tf.ensure_shape(entries, [None, *tensor.shape[1:]])


def total(mesh: Any, tensor: Any, channel: Channel) -> Any:
    """Return the sum of a tensor over the processes; of a sparse gradient the slices of all."""
    if mesh.num_processes == 1:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return _all_slices(mesh, tensor, channel)
    vector = exchanged(mesh, tf.reshape(_sendable(tensor), [-1]), "sum", channel.number)
    sum_of_all = tf.cast(tf.reshape(vector, tf.shape(tensor)), tensor.dtype)
    return tf.ensure_shape(sum_of_all, tensor.shape)


def _all_slices(mesh: Any, slices: tf.IndexedSlices, channel: Channel) -> tf.IndexedSlices:
    count = tf.shape(slices.indices)[:1]
    counts = tf.reshape(exchanged(mesh, count, "gather", channel.number), [-1])
    longest = tf.reduce_max(counts)
    is_slice = tf.reshape(tf.sequence_mask(counts, longest), [-1])  # and no padding
    values, indices = (
        tf.boolean_mask(gathered(mesh, tensor, longest, channel.of_gradient()), is_slice)
        for tensor in (slices.values, slices.indices)
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def summed(mesh: Any, tensor: Any, channel: Channel) -> Any:
    """Return the sum over the processes of what each has; its gradient is the same in all."""
    sum_of_all = total(mesh, tensor, channel)
    if mesh.num_processes == 1 or not is_differentiable(tensor):
        return sum_of_all
    return with_gradient(
        sum_of_all,
        tensor,
        lambda upstream: with_summed_gradient(mesh, upstream, channel.of_gradient()),
    )


def with_summed_gradient(mesh: Any, tensor: Any, channel: Channel) -> Any:
    """Return a tensor that all processes have; its gradients are added up over the processes."""
    if mesh.num_processes == 1 or not is_differentiable(tensor):
        return tensor

    def gradient(upstream: Any) -> Any:
        add_up = total if isinstance(upstream, tf.IndexedSlices) else summed
        return add_up(mesh, upstream, channel.of_gradient())

    return with_gradient(tensor, tensor, gradient)


def _sendable(tensor: Any) -> Any:
    """Return a tensor in one of the few types that processes can send each other."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex:
        return tf.cast(tensor, tf.float32) if dtype.size < tf.float32.size else tensor
    return tf.cast(tensor, tf.int64 if dtype.size >= tf.int32.size else tf.int32)
