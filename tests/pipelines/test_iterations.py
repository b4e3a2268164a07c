"""Every iteration of a dataset, made again, goes on from any of its batches."""

import numpy as np
import pytest
import tensorflow as tf

from kdpkit.pipelines._iterations import replayed

Dataset = tf.data.Dataset
EPOCHS = 3


def shuffled(buffer=4, seed=3, **settings):
    return Dataset.range(10).shuffle(buffer, seed=seed, **settings)


def known(count):
    return tf.data.experimental.assert_cardinality(count)


def of_two_sources():
    two = [shuffled(10, 1), Dataset.range(10, 20).shuffle(10, seed=2)]
    return Dataset.sample_from_datasets(two, weights=[0.5, 0.5], seed=3).apply(known(20))


def interleaved():
    of_three = shuffled().interleave(
        lambda index: Dataset.range(index, index + 3), cycle_length=2, num_parallel_calls=2
    )
    return of_three.batch(3).apply(known(10))


AS_TENSORFLOW = {
    "shuffle": lambda: shuffled(10).batch(2),
    "negative seed": lambda: shuffled(seed=-3).map(lambda n: n * 2).batch(4).prefetch(1),
    "fixed order": lambda: shuffled(reshuffle_each_iteration=False).shuffle(3, seed=1).batch(2),
    "zip": lambda: (
        Dataset.zip((shuffled(seed=2**40), shuffled(3).repeat(2))).shuffle(5, seed=9).batch(3)
    ),
    "choice": of_two_sources,
    "interleaved": interleaved,
    "shuffle of shuffles": lambda: shuffled().shuffle(3, seed=1).batch(2),
    "fused repeat": lambda: shuffled().repeat(2).batch(2),
}
OWN_ORDER = {
    "repeat": lambda: shuffled().batch(2).repeat(3),
    "repeats": lambda: shuffled().batch(2).repeat(3).repeat(2).shuffle(3, seed=2).repeat(2),
    "concatenated": lambda: shuffled().batch(2).concatenate(shuffled(4).batch(2)).repeat(2),
    "steps of an endless one": lambda: shuffled(10).batch(3).repeat().take(7),
}


def elements(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@pytest.mark.parametrize("name", [*AS_TENSORFLOW, *OWN_ORDER])
def test_each_epoch_has_an_order_of_its_own_and_goes_on_from_any_batch(name):
    make = (AS_TENSORFLOW | OWN_ORDER)[name]
    tracked = replayed(make()).tracked()
    epochs = [elements(tracked) for _ in range(EPOCHS)]
    plain = make()
    of_tensorflow = [elements(plain) for _ in range(EPOCHS)]
    if name in AS_TENSORFLOW:
        assert epochs == of_tensorflow
    else:
        assert len({str(epoch) for epoch in epochs}) == EPOCHS
        assert [sorted(map(len, epoch)) for epoch in epochs] == [
            sorted(map(len, epoch)) for epoch in of_tensorflow
        ]
    tracked.epoch_counter.move(EPOCHS - 1, 2)
    assert elements(tracked) == epochs[-1][2:]


def test_every_pass_of_a_repeat_has_every_example_in_an_order_of_its_own():
    tracked = replayed(shuffled(10).batch(5).repeat(3)).tracked()
    passes = [
        tuple(number for batch in epoch[at : at + 2] for number in batch)
        for epoch in (elements(tracked), elements(tracked))
        for at in (0, 2, 4)
    ]
    assert len(set(passes)) == 6
    assert all(sorted(one) == list(range(10)) for one in passes)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Dataset.zip((shuffled(),) * 2), "`shuffle.4.` is read at several positions"),
        (
            lambda: Dataset.range(4).flat_map(lambda _: shuffled()).apply(known(40)),
            "`flat_map.* shuffles in its function.*Shuffle outside",
        ),
    ],
)
def test_an_order_that_is_not_known_raises(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        replayed(make())
