"""Every iteration of a dataset, made again from any of its batches, is TensorFlow's own."""

import datasets
import numpy as np
import pytest
import tensorflow as tf

from kdpkit.pipelines._iterations import replayed

Dataset = tf.data.Dataset
EPOCHS = 3


def shuffled(buffer=4, seed=3, **settings):
    return Dataset.range(10).shuffle(buffer, seed=seed, **settings)


def numbers(index):
    return Dataset.range(index, index + 3)


def known(count):
    return tf.data.experimental.assert_cardinality(count)


def unoptimized():
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return options


def of_two_sources():
    two = [shuffled(10, 1), Dataset.range(10, 20).shuffle(10, seed=2)]
    return Dataset.sample_from_datasets(two, weights=[0.5, 0.5], seed=3).apply(known(20))


DATASETS = {
    "shuffle": lambda: shuffled(10).batch(2),
    "fixed order": lambda: shuffled(reshuffle_each_iteration=False).shuffle(3, seed=1).batch(2),
    "zip": lambda: Dataset.zip((shuffled(seed=2**40), shuffled(3))).shuffle(5, seed=9).batch(3),
    "choice": of_two_sources,
    "concatenated": lambda: shuffled().batch(2).concatenate(shuffled(4).batch(2)),
    "interleaved": lambda: (
        shuffled()
        .interleave(numbers, cycle_length=2, num_parallel_calls=2)
        .batch(3)
        .apply(known(10))
    ),
    "within a function": lambda: (
        Dataset.range(4)
        .flat_map(lambda _: Dataset.range(5).shuffle(5, seed=3))
        .shuffle(3, seed=2)
        .batch(3)
        .apply(known(7))
    ),
    "repeat before shuffle": lambda: Dataset.range(5).repeat(2).shuffle(3, seed=1).batch(2),
    "options": lambda: shuffled().with_options(tf.data.Options()).batch(3),
}


def elements(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_each_epoch_is_tensorflows_from_any_of_its_batches(make):
    plain = make()
    epochs = [elements(plain) for _ in range(EPOCHS)]
    tracked = replayed(make()).tracked()
    assert [elements(tracked) for _ in range(EPOCHS)] == epochs
    tracked.epoch_counter.move(EPOCHS - 1, 2)
    assert elements(tracked) == epochs[-1][2:]


def endless():
    return shuffled().repeat().batch(4)


@pytest.mark.parametrize(
    "make",
    [
        endless,
        lambda: endless().with_options(unoptimized()),
        lambda: shuffled().batch(3).repeat().shuffle(3, seed=2).prefetch(2),
    ],
)
def test_an_endless_dataset_goes_on_from_any_batch(make):
    tracked = replayed(make()).tracked()
    tracked.epoch_counter.move(0, 7)
    assert elements(tracked.take(9)) == elements(make().take(16))[7:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: endless().take(7),
        lambda: shuffled().batch(3).repeat(3),
        lambda: Dataset.zip((endless(), Dataset.range(9))),
    ],
)
def test_a_repeat_that_ends_or_is_not_read_to_its_end_raises(make):
    with pytest.raises(ValueError, match=r"`repeat\(3?\)` starts `shuffle` again.*steps_per_epoch"):
        replayed(make())


def test_a_library_s_stage_is_named_by_its_library():
    data = datasets.Dataset.from_dict({"a": [*range(20)]})
    with pytest.raises(ValueError, match=r"`datasets\.\w+` draws.*Leave out its shuffling"):
        replayed(data.to_tf_dataset(batch_size=4, columns="a", shuffle=True))
    resampled = shuffled().rejection_resample(lambda n: tf.cast(n % 2, tf.int32), [0.2, 0.8])
    with pytest.raises(ValueError, match="`tensorflow.rejection_resample` draws"):
        replayed(resampled.batch(2))


def test_an_unknown_length_names_the_last_stage_that_the_user_wrote():
    data = Dataset.from_generator(
        lambda: iter(range(9)), output_signature=tf.TensorSpec([], "int64")
    )
    with pytest.raises(ValueError, match=r"batches is unknown.*last_stage='shuffle\(4\)'"):
        replayed(data.shuffle(4, seed=1))


def test_one_shuffle_at_two_positions_raises():
    both = shuffled()
    with pytest.raises(ValueError, match="`shuffle.4.` is read at several positions"):
        replayed(Dataset.zip((both, both)))
