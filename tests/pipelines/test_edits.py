"""An edit gives what the pipeline gives without it, and reads as one would write it."""

import collections
import itertools

import pytest
import tensorflow as tf

from kdpkit import pipelines
from kdpkit.pipelines import _edits

Dataset = tf.data.Dataset
EXAMPLES = 40


def work(number):
    return tf.linalg.det(tf.eye(3) * tf.cast(number, tf.float32))


def noisy(number):
    return tf.cast(number, tf.float32) * tf.random.uniform([])


def opened(number):
    return Dataset.from_tensors(number).map(work)


PIPELINES = {
    "map": Dataset.range(EXAMPLES).map(work).shuffle(7).batch(8, drop_remainder=True),
    "map behind a shuffle": Dataset.range(EXAMPLES).shuffle(7).map(work).batch(8),
    "interleave": Dataset.range(EXAMPLES).interleave(opened, cycle_length=4).batch(8),
    "padded batches": (
        Dataset.range(EXAMPLES)
        .map(lambda n: tf.fill([n % 3 + 1], work(n)))
        .padded_batch(8, padded_shapes=[4], padding_values=-1.0)
        .prefetch(1)
    ),
    "pairs": Dataset.range(EXAMPLES).map(lambda n: (n, work(n))).filter(lambda n, _: n % 2 == 0),
    "skipped": Dataset.range(EXAMPLES).skip(4).map(work).take(20).batch(4, num_parallel_calls=2),
}


def texts(dataset):
    return [edit.text for edit in _edits.edits(dataset)]


def counted(dataset, batches):
    """Count all numbers that a dataset gives; values of floats are exact here."""
    given = itertools.islice(dataset, batches)
    arrays = (part.numpy().ravel() for element in given for part in tf.nest.flatten(element))
    return collections.Counter(number for array in arrays for number in array.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_an_edit_changes_neither_the_examples_nor_their_form(name):
    dataset = PIPELINES[name]
    found = [*_edits.edits(dataset)]
    assert found
    for edit in found:
        made = edit.make()
        assert made.element_spec == dataset.element_spec
        if edit.memory_bytes == 0:
            assert counted(made, None) == counted(dataset, None)
        else:  # four batches of the first examples, again and again
            assert {*counted(made, 4)} <= {*counted(dataset, None)}
            assert len([*made.take(50)]) == 50


def test_edits_are_named_as_they_are_written():
    assert texts(PIPELINES["map"]) == [
        "Write `.map(work, num_parallel_calls=tf.data.AUTOTUNE)`.",
        "End the pipeline with `.prefetch(tf.data.AUTOTUNE)`.",
        "Put `.cache()` after `map(work)`.",
    ]
    assert texts(PIPELINES["map behind a shuffle"])[-1] == (
        "Put `map(work)` and then `.cache()` before the `shuffle`."
    )
    assert texts(PIPELINES["interleave"])[0] == (
        "Write `.interleave(opened, cycle_length=4, num_parallel_calls=4)`."
    )


def test_a_cache_reports_the_bytes_of_all_examples():
    *_, cache = _edits.edits(PIPELINES["map"])
    assert cache.memory_bytes == EXAMPLES * 4
    *_, cache = _edits.edits(PIPELINES["interleave"])
    assert cache.memory_bytes is None


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(EXAMPLES).map(noisy).batch(8),
        Dataset.range(EXAMPLES).map(work).cache().shuffle(7).batch(8),
        Dataset.range(EXAMPLES).shuffle(7).batch(8),
        Dataset.range(EXAMPLES).repeat().map(work).batch(8),
        pipelines.train_pipeline(Dataset.range(EXAMPLES), global_batch_size=8),
    ],
    ids=["random", "cached", "nothing to keep", "endless", "train_pipeline"],
)
def test_no_cache_where_it_would_freeze_or_save_nothing(dataset):
    assert not any("cache" in text for text in texts(dataset))


def test_nothing_is_made_again_across_a_stage_that_is_not_known():
    kept = Dataset.range(EXAMPLES).map(work).batch(8).unbatch().batch(4)
    assert not any("num_parallel_calls" in text for text in texts(kept))


def test_options_are_kept_and_random_numbers_of_tensorflow_do_not_move():
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = PIPELINES["map"].with_options(options)
    tf.random.set_seed(3)
    undisturbed = tf.random.uniform([]).numpy()
    tf.random.set_seed(3)
    for edit in _edits.edits(dataset):
        assert edit.make().options().autotune.enabled is False
    assert tf.random.uniform([]).numpy() == undisturbed
