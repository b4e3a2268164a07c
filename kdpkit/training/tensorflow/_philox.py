"""Philox (Salmon et al. 2011) in operations that XLA compiles into vectors on a CPU.

XLA's own draws one number after the other: docs/upstream/xla_draws_one_by_one.md.
"""

from typing import Any

import tensorflow as tf

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def uniform(shape: Any, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Return the numbers of `StatelessRandomUniformV2` under XLA, float32 in one axis.

    Each of a block's four numbers is computed with all rounds of the block, so that none has to
    wait for another, and what is computed for all is a loop without branches.
    """
    index = tf.range(tf.cast(shape[0], tf.int64))
    low = counter[0] + tf.cast(index // 4, tf.uint64)
    high = counter[1] + tf.cast(low < counter[0], tf.uint64)
    first, second, third, fourth = _rounds([*_halves(low), *_halves(high)], [*_halves(key[0])])
    word = index % 4
    bits = tf.where(
        word < 2, tf.where(word == 0, first, second), tf.where(word == 2, third, fourth)
    )
    mantissa = tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32))
    return tf.bitcast(mantissa | tf.constant(0x3F800000, tf.uint32), tf.float32) - 1.0


def _rounds(words: list[tf.Tensor], keys: list[tf.Tensor]) -> list[tf.Tensor]:
    for _ in range(_ROUNDS):
        (low_0, high_0), (low_1, high_1) = (
            _halves(tf.cast(word, tf.uint64) * tf.constant(factor, tf.uint64))
            for word, factor in zip(words[::2], _FACTORS, strict=True)
        )
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [
            key + tf.constant(step, tf.uint32) for key, step in zip(keys, _KEY_STEPS, strict=True)
        ]
    return words


def _halves(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the low and the high half of 64 bits."""
    high = tf.bitwise.right_shift(number, tf.constant(32, tf.uint64))
    return tf.cast(number, tf.uint32), tf.cast(high, tf.uint32)
