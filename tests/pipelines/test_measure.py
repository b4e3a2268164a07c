"""The stage that sleeps is the slowest, and measuring leaves no trace."""

import time

import numpy as np
import pytest
import tensorflow as tf

from kdpkit import pipelines
from kdpkit.pipelines import measure

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


def untuned(dataset):
    """Spare the test the minute that TensorFlow's tuning may wait."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


PIPELINES = {  # and how often a batch sleeps
    "before a batch": (lambda: Dataset.range(400).map(slow).shuffle(10).batch(8).prefetch(2), 8),
    "between cheap ones": (lambda: Dataset.range(400).map(cheap).map(slow).map(cheap).batch(4), 4),
}


@pytest.mark.parametrize(("make", "sleeps"), PIPELINES.values(), ids=PIPELINES)
def test_the_stage_that_sleeps_is_named_and_costs_its_sleep(make, sleeps):
    report = measure(untuned(make()), seconds=1.0)
    assert report.slowest == "map(slow)"
    assert dict(report.stages)["map(slow)"] >= 0.9e3 * SLEEP * sleeps
    assert report.batches_per_second <= 1 / (SLEEP * sleeps)
    (marked,) = (line for line in str(report).splitlines() if line.endswith("slowest"))
    assert marked.startswith("map(slow)")


def test_a_cache_is_paid_for_once():
    kept = Dataset.range(10).map(slow).cache().batch(4).prefetch(1)
    report = measure(untuned(kept), seconds=5.0)
    assert report.slowest == "map(slow)"
    assert dict(report.stages)["map(slow)"] >= 0.9e3 * SLEEP * 4
    assert report.batches_per_second > 1 / SLEEP  # read from the cache


def test_a_train_pipeline_is_one_stage_and_its_epoch_does_not_move():
    def build():
        return pipelines.train_pipeline(Dataset.range(64), global_batch_size=8)

    def epochs(train, count):
        return [[int(n) for batch in train for n in batch] for _ in range(count)]

    undisturbed = epochs(build(), 3)
    train = build()
    assert epochs(train, 1) == undisturbed[:1]
    for _ in train.take(3):
        pass
    state = train.epoch_counter.position(), train.epoch_counter.has_given()
    assert measure(train, seconds=0.5).stages[-1][0] == "train_pipeline"
    assert measure(train.map(cheap).prefetch(1), seconds=0.5).batches_per_second > 0
    assert (train.epoch_counter.position(), train.epoch_counter.has_given()) == state
    assert epochs(train, 2) == undisturbed[1:]


def test_what_cannot_be_measured_raises():
    with pytest.raises(ValueError, match="`seconds` must be"):
        measure(Dataset.range(3), seconds=0)
    with pytest.raises(ValueError, match="`dataset` must be a tf.data.Dataset"):
        measure(np.zeros(3))
    with pytest.raises(ValueError, match="`dataset` is empty"):
        measure(Dataset.range(0).batch(3))
