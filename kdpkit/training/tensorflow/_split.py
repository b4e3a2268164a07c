"""Which examples of a batch each device has: `ceil(n / parts)` each, the last ones fewer or none.

A device without examples of its own borrows the last one of the batch. What it computes from that
is cut off again where the parts are put together, so that no operation meets an empty tensor, and
no mean or statistic of nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Split(NamedTuple):
    """Where the parts of the examples begin and end, of the devices of this process.

    Args:
        total: The number of all examples.
        starts: Where each part begins.
        counts: How many examples it has; one if it is borrowed.
        kept: How many of these are its own: none of what is borrowed.
        length_id: The number of examples if it is known before the step runs, or else an object of
            its own. Of splits whose ids are equal the numbers are, too.
        bounds: Of a slice of all examples: where it begins and ends, and its steps.
    """

    total: Any
    starts: Sequence[Any]
    counts: Sequence[Any]
    kept: Sequence[Any]
    length_id: object = None
    bounds: Sequence[Any] = ()


def split(total: Any, num_parts: int, local: Sequence[int], length_id: object) -> Split:
    """Split so many examples into parts, of which this process has some."""
    with tf.device("CPU:0"):
        size, one = -(-total // num_parts), tf.minimum(total, 1)
        starts = [tf.minimum(index * size, total - one) for index in local]
        kept = [tf.clip_by_value(total - index * size, 0, size) for index in local]
        counts = [tf.maximum(count, one) for count in kept]
        bounds = [tf.constant([0]), tf.stack([total]), tf.constant([1])]
    return Split(total, starts, counts, kept, length_id, bounds)


def of_all_examples(tensor: Any, split: Split, each: Any) -> Any:
    """Return a tensor's entries of the examples, without those that were borrowed, which come last.

    Args:
        tensor: The tensor.
        split: How the examples are split.
        each: How many entries it has for each; of one alone no length has to be worked out.
    """
    if isinstance(each, int) and each == 1 and split.bounds:
        begin, end, strides = split.bounds
        return tf.raw_ops.StridedSlice(input=tensor, begin=begin, end=end, strides=strides)
    return tensor[: split.total * each]


def entries_of_each(tensor: Any, count: Any) -> Any:
    """Return how many entries along its first axis a tensor has for each of so many examples."""
    with tf.device("CPU:0"):
        return tf.shape(tensor)[0] // tf.maximum(count, 1)


def of_any_length(tensor: Any) -> Any:
    """Hide how many examples a tensor has: what is known would be taken for another axis."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])
