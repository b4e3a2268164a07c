"""The stage that sleeps is the slowest, and measuring leaves no trace."""

import time

import pytest
import tensorflow as tf

from kdpkit import pipelines
from kdpkit._internal.datasets import untuned
from kdpkit.pipelines._measure import slowest_stage, undisturbed

pytestmark = pytest.mark.slow
Dataset = tf.data.Dataset
SLEEP = 0.02  # seconds for an element


def slow(number):
    def sleep(value):
        time.sleep(SLEEP)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [number], tf.int64), number.shape)


def cheap(number):
    return number + 1


PIPELINES = {
    "before a batch": lambda: Dataset.range(400).map(slow).shuffle(10).batch(8).prefetch(2),
    "between cheap ones": lambda: Dataset.range(400).map(cheap).map(slow).map(cheap).batch(4),
    "before a cache": lambda: Dataset.range(10).map(slow).cache().batch(4).prefetch(1),
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_the_stage_that_sleeps_is_named(make):
    assert slowest_stage(untuned(make()), seconds=0.5) == "map(slow)"


def test_the_epoch_of_a_train_pipeline_does_not_move():
    def build():
        return pipelines.train_pipeline(Dataset.range(64), global_batch_size=8)

    def epochs(train, count):
        return [[int(n) for batch in train for n in batch] for _ in range(count)]

    expected = epochs(build(), 3)
    train = build()
    assert epochs(train, 1) == expected[:1]
    for _ in train.take(3):
        pass
    state = train.epoch_counter.position(), train.epoch_counter.has_given()
    with undisturbed(train):
        assert slowest_stage(train.map(slow), seconds=0.3) == "map(slow)"
    assert (train.epoch_counter.position(), train.epoch_counter.has_given()) == state
    assert epochs(train, 2) == expected[1:]
