"""Which examples of a batch each device has: `ceil(n / parts)` each, the last ones fewer or none.

A device without examples borrows the last one of the batch, so that no operation gets an empty
tensor, and no mean or statistic is that of nothing. What it computes from the borrowed example is
cut off again where the parts are joined.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Parts(NamedTuple):
    """Where the parts of this process' devices begin and end.

    Args:
        total: The number of all examples.
        starts: Where each part begins.
        counts: How many examples each part has; one if it is borrowed.
        unborrowed: How many of these are not borrowed.
        size: The most examples that a part has.
    """

    total: Any
    starts: Sequence[Any]
    counts: Sequence[Any]
    unborrowed: Sequence[Any]
    size: Any


def parts_of(total: Any, num_parts: int, local: Sequence[int]) -> Parts:
    """Split so many examples into parts, of which this process has those in `local`."""
    with tf.device("CPU:0"):
        size, borrowed = -(-total // num_parts), tf.minimum(total, 1)
        starts = [tf.minimum(index * size, total - borrowed) for index in local]
        unborrowed = [tf.clip_by_value(total - index * size, 0, size) for index in local]
        counts = [tf.maximum(count, borrowed) for count in unborrowed]
    return Parts(total, starts, counts, unborrowed, size)
