"""Which epoch a dataset is giving, known to the dataset itself.

Keras starts more iterators than there are epochs: one to build the model under a strategy, and
one ahead of each epoch. `shuffle(reshuffle_each_iteration=True)` counts them all, so that the
same seed gives other orders on one device than on many. Here an epoch is over when its last
batch has been handed on; iterators started and dropped count for nothing.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class EpochCounter:
    """The epoch that the next iterator gives, kept where a dataset's graph can read and move it.

    A lookup table holds it because, unlike a `tf.Variable`, it is the same object inside and
    outside a strategy's scope.
    """

    def __init__(self, initial_epoch: int, *, batches: int) -> None:
        self._batches = batches
        with tf.device("CPU:0"):
            self._key = tf.constant("epoch")
            self._table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
            self._table.insert(self._key, tf.constant(initial_epoch, tf.int64))

    def dataset(
        self, one_epoch: Callable[[Any], tf.data.Dataset], *, prefetch: int
    ) -> tf.data.Dataset:
        """Give a dataset of batches whose every full iteration is the next `one_epoch(epoch)`.

        `one_epoch` takes the epoch, an int64 scalar, and gives a dataset of `(index, batch)`
        pairs, where `index` counts the batches from the start of a whole epoch. Batches are
        prefetched before they are counted, so that the work ahead counts for nothing either.
        """

        def batches(epoch: Any) -> tf.data.Dataset:
            return one_epoch(epoch).map(lambda index, batch: (epoch, index, batch))

        start = tf.data.Dataset.range(1).map(lambda _: self._table.lookup(self._key))
        return start.flat_map(batches).prefetch(prefetch).map(self._hand_on)

    def _hand_on(self, epoch: Any, index: Any, batch: Any) -> Any:
        """Pass a batch on; with the last one the epoch is over."""
        is_last = tf.equal(index, self._batches - 1)
        following = tf.where(is_last, epoch + 1, self._table.lookup(self._key))
        self._table.insert(self._key, following)
        return batch
