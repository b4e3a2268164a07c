"""The stage that sleeps is the slowest, and measuring leaves no trace."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

from kdpkit import pipelines
from kdpkit.pipelines import measure

pytestmark = pytest.mark.slow
Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE
SLEEP = 0.02  # seconds for an example
MICROSECONDS = 1e6 * SLEEP


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


def cost_of(report, kind):
    (cost,) = (cost for cost in report.stages if cost.stage.startswith(kind))
    return cost


PIPELINES = {
    "before a batch": lambda: Dataset.range(400).map(slow).shuffle(10).batch(8).prefetch(2),
    "between cheap ones": lambda: Dataset.range(400).map(cheap).map(slow).map(cheap).batch(4),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_stage_that_sleeps_is_named_and_costs_its_sleep(name):
    report = measure(untuned(PIPELINES[name]()), seconds=1.0)
    assert report.slowest == "map(slow)"
    assert cost_of(report, report.slowest).microseconds_per_example >= 0.9 * MICROSECONDS
    assert report.examples_per_second <= 1 / SLEEP


def test_work_on_batches_is_divided_by_their_examples():
    batches = Dataset.range(800).batch(8).map(slow).prefetch(1)
    report = measure(untuned(batches), seconds=1.0)
    assert report.slowest == "map(slow)"
    assert cost_of(report, "map").microseconds_per_example >= MICROSECONDS / 8
    assert report.batches_per_second <= 1 / SLEEP
    assert report.examples_per_second == pytest.approx(8 * report.batches_per_second)


def test_a_cache_is_paid_for_once():
    kept = Dataset.range(10).map(slow).cache().batch(4).prefetch(1)
    report = measure(untuned(kept), seconds=5.0)
    assert cost_of(report, "map").microseconds_per_example >= MICROSECONDS
    assert report.slowest == "map(slow)"
    assert report.examples_per_second > 1 / SLEEP  # read from the cache


def test_a_cache_that_is_not_filled_in_time_leaves_no_lock(tmp_path):
    kept = Dataset.range(4000).map(slow).cache(str(tmp_path / "cache")).batch(4)
    assert measure(untuned(kept), seconds=1.0).examples < 4000
    assert measure(untuned(kept), seconds=0.5).examples > 0


def test_what_waits_for_a_large_buffer_is_left_out():
    report = measure(untuned(Dataset.range(400).map(slow).shuffle(60).batch(4)), seconds=0.6)
    assert [cost.microseconds_per_example is None for cost in report.stages] == [
        *(False, False),
        *(True, True),
    ]
    assert report.first_batch_seconds >= 60 * SLEEP


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
    report = measure(train, seconds=0.5)
    assert [cost.stage for cost in report.stages][-1] == "train_pipeline"
    assert measure(train.map(cheap).prefetch(1), seconds=0.5).examples % 8 == 0
    assert (train.epoch_counter.position(), train.epoch_counter.has_given()) == state
    assert epochs(train, 2) == undisturbed[1:]


@pytest.mark.parametrize(
    ("make", "examples"),
    [
        (lambda: Dataset.range(22).batch(5), 22),
        (lambda: Dataset.range(3).batch(5), 3),
        (lambda: Dataset.zip((Dataset.range(9).batch(3), Dataset.range(9).batch(3))), 9),
        (lambda: Dataset.range(9).batch(3).unbatch(), 9),
        (lambda: Dataset.range(9).batch(3).rebatch(2), 9),
        (lambda: Dataset.range(9).map(lambda n: tf.fill([7], n)), 9),
        (lambda: Dataset.range(50).batch(10).map(tf.reduce_sum), 5),
    ],
)
def test_examples_are_counted_where_there_are_batches(make, examples):
    assert measure(untuned(make()), seconds=0.2).examples == examples


def test_the_report_is_a_table_of_80_columns_and_plain_values():
    def a_function_whose_name_is_longer_than_a_column_of_the_table(number):
        return slow(number)

    mapped = Dataset.range(400).map(a_function_whose_name_is_longer_than_a_column_of_the_table)
    report = measure(untuned(mapped.batch(4).prefetch(AUTOTUNE)), seconds=1.0)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[4:]] == [
        "map(a_function_whose_name_is_longer_than_a_co...",
        *("batch(4)", "prefetch(AUTOTUNE)"),
    ]
    assert "slowest" in lines[4]
    assert json.loads(json.dumps(report.to_dict()))["slowest"] == report.slowest


def test_what_cannot_be_measured_raises():
    with pytest.raises(ValueError, match="`seconds` must be"):
        measure(Dataset.range(3), seconds=0)
    with pytest.raises(ValueError, match="`dataset` must be a tf.data.Dataset"):
        measure(np.zeros(3))
    with pytest.raises(ValueError, match="`dataset` is empty"):
        measure(Dataset.range(0).batch(3))
