"""Which examples of a batch each device has: `ceil(n / parts)` each, the last ones fewer or none.

A device without examples borrows the last one of the batch, so that no operation gets an empty
tensor, and no mean or statistic is that of nothing. What it computes from the borrowed example is
cut off again where the parts are joined.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Split(NamedTuple):
    """Where the parts of this process' devices begin and end.

    Args:
        total: The number of all examples.
        starts: Where each part begins.
        counts: How many examples each part has; one if it is borrowed.
        unborrowed: How many of these are not borrowed.
        length_id: The number of examples if it is known before the step runs, or else an object
            that stands for it. Splits with equal ids have equally many examples.
        bounds: Begin, end and strides of the slice of all examples, which many joins use.
    """

    total: Any
    starts: Sequence[Any]
    counts: Sequence[Any]
    unborrowed: Sequence[Any]
    length_id: object = None
    bounds: Sequence[Any] = ()


def split(total: Any, num_parts: int, local: Sequence[int], length_id: object) -> Split:
    """Split so many examples into parts, of which this process has those in `local`."""
    with tf.device("CPU:0"):
        size, borrowed = -(-total // num_parts), tf.minimum(total, 1)
        starts = [tf.minimum(index * size, total - borrowed) for index in local]
        unborrowed = [tf.clip_by_value(total - index * size, 0, size) for index in local]
        counts = [tf.maximum(count, borrowed) for count in unborrowed]
        bounds = [tf.constant([0]), tf.stack([total]), tf.constant([1])]
    return Split(total, starts, counts, unborrowed, length_id, bounds)


def entries_per_example(tensor: Any, num_examples: Any) -> Any:
    """Return how many entries along its first axis a tensor has for each of so many examples."""
    with tf.device("CPU:0"):
        return tf.shape(tensor)[0] // tf.maximum(num_examples, 1)


def with_unknown_length(tensor: Any) -> Any:
    """Hide the length of the first axis, which code could take for the length of another axis."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])
