import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import strategies, testing
from kdpkit.pipelines import PipelineConfig, eval_pipeline, train_pipeline
from kdpkit.testing import generators, laws

FEW = settings(max_examples=15)


def numbers(batches):
    return [int(number) for batch in batches for number in batch]


def weights_after_fit(dataset, replicas, **fit_arguments):
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    with strategy.scope():
        model = testing.tiny_classifier()
        model.compile(
            optimizer=keras.optimizers.SGD(0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(dataset, verbose=0, **fit_arguments)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@FEW
@given(
    shards=generators.shards(min_examples=2),
    buffer=st.sampled_from([0, 3, 1000]),
    cache=st.booleans(),
)
def test_every_kept_example_comes_exactly_once_an_epoch(shards, buffer, cache):
    train = train_pipeline(
        tf.data.Dataset.range(shards.examples),
        PipelineConfig(shuffle_buffer=buffer, remainder="keep", cache=cache),
        global_batch_size=shards.global_batch_size,
        replicas=shards.processes,
        keep=lambda number: number % 3 != 1,
        prepare=lambda number: number * 10,
    )
    kept = np.array([number * 10 for number in range(shards.examples) if number % 3 != 1])
    for _ in range(2):
        laws.every_example_once(train, examples=kept)


@settings(max_examples=6)
@given(
    epoch=st.integers(0, 2),
    step=st.integers(0, 4),
    remainder=st.sampled_from(["drop", "keep"]),
    seed=st.integers(0, 2**40),
)
def test_epochs_are_new_and_follow_from_the_seed_alone_from_any_batch(epoch, step, remainder, seed):
    def noisy(batch, of_batch):
        drawn = tf.random.stateless_uniform(tf.shape(batch), of_batch, 0, 10**9, tf.int64)
        return tf.stack([batch, drawn], axis=1)

    def build():
        config = PipelineConfig(seed=seed, remainder=remainder)
        return train_pipeline(tf.data.Dataset.range(23), config, global_batch_size=4, augment=noisy)

    def elements(dataset):
        return [batch.numpy().tolist() for batch in dataset]

    complete = build()
    epochs = [elements(complete) for _ in range(4)]
    every = np.concatenate([np.concatenate(one) for one in epochs])
    assert len({str(one) for one in epochs}) == 4
    assert len(np.unique(every[:, 1])) == len(every)
    tf.random.set_seed(seed + 1)  # of the program, which changes nothing
    resumed = build().tracked()
    resumed.epoch_counter.move(epoch, step)
    assert [elements(resumed) for _ in range(2)] == [epochs[epoch][step:], epochs[epoch + 1]]


def test_functions_of_users_may_branch_on_tensors_in_python():
    def keep(number):
        kept = True
        if number < 2:
            kept = False
        return kept

    def prepare(number):
        if number == 3:
            number = -number
        return number

    def augment(batch, seed):
        if tf.shape(seed)[0] == 2:
            batch += 10
        return batch

    source, stages = tf.data.Dataset.range(6), {"keep": keep, "prepare": prepare}
    train = train_pipeline(source, global_batch_size=2, augment=augment, **stages)
    assert sorted(numbers(train)) == [7, 12, 14, 15]
    evaluation = eval_pipeline(source, global_batch_size=2, remainder="keep", **stages)
    assert numbers(evaluation) == [2, -3, 4, 5]


def test_looking_at_a_batch_does_not_use_up_an_epoch():
    def build():
        return train_pipeline(tf.data.Dataset.range(100), global_batch_size=2)

    looked_at = build()
    for _ in range(3):
        next(iter(looked_at))
    assert numbers(looked_at) == numbers(build())


def test_it_is_a_dataset_like_any_other():
    def build():
        source = tf.data.Dataset.from_tensor_slices(np.arange(10))
        return train_pipeline(source, global_batch_size=4)

    epoch = numbers(build())
    strategy = strategies.select_strategy("mirrored", devices=1)
    total = tf.function(
        lambda batches: batches.reduce(np.int64(0), lambda a, b: a + tf.reduce_sum(b))
    )
    assert build().element_spec.shape == (4,)  # static, for XLA and TPUs
    assert len(build().prefetch(1)) == 2
    assert numbers(build().map(lambda batch: batch + 1).prefetch(1)) == [n + 1 for n in epoch]
    assert numbers(strategy.experimental_distribute_dataset(build())) == epoch
    assert int(total(build())) == sum(epoch)


def test_fit_sees_the_same_epochs_on_one_device_and_on_replicas():
    x, y = testing.toy_classification(20)

    def build(replicas):
        source = tf.data.Dataset.from_tensor_slices((x, y))
        config = PipelineConfig(prefetch=8)
        return train_pipeline(source, config, global_batch_size=4, replicas=replicas)

    one, many = (weights_after_fit(build(count), count, epochs=3) for count in (1, 4))
    np.testing.assert_allclose(many, one, rtol=0, atol=2e-6)


def test_the_epochs_of_fit_are_the_epochs_of_a_plain_loop():
    seen = []

    class Recorder(keras.Model):
        def train_step(self, batch):
            tf.py_function(lambda numbers: seen.extend(numbers.numpy().tolist()), [batch], [])
            return {"examples": tf.size(batch)}

        def call(self, inputs):
            return inputs

    def build():
        source = tf.data.Dataset.range(40)
        sizes = {"global_batch_size": 2, "steps_per_epoch": 8}
        return train_pipeline(source, keep=lambda number: number % 2 == 0, **sizes)

    model = Recorder()
    model.compile()
    model.fit(build(), epochs=3, verbose=0)
    loop = build()
    assert len(loop) == 8
    epochs = [numbers(loop) for _ in range(3)]
    assert seen == [number for epoch in epochs for number in epoch]
    assert [len(set(epoch)) for epoch in epochs] == [16] * 3
    assert len(set(map(tuple, epochs))) == 3


def test_preparation_runs_once_and_augmentation_every_epoch():
    calls = {"prepare": 0, "augment": 0}

    def counting(name):
        def count(value, *_):
            def add(value):
                calls[name] += 1
                return value

            return tf.ensure_shape(tf.py_function(add, [value], tf.int64), value.shape)

        return count

    train = train_pipeline(
        tf.data.Dataset.range(6),
        global_batch_size=2,
        prepare=counting("prepare"),
        augment=counting("augment"),
    )
    for _ in range(3):
        numbers(train)
    assert calls == {"prepare": 6, "augment": 9}


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
def test_no_tuning_thread_holds_up_the_end_of_an_epoch(build):
    assert build(tf.data.Dataset.range(8), global_batch_size=4).options().autotune.enabled is False


@FEW
@given(shards=generators.shards(min_examples=1))
def test_evaluation_sees_every_example_once_in_order(shards):
    size, numbers = shards.global_batch_size, np.arange(shards.examples)
    source = tf.data.Dataset.from_tensor_slices((numbers, numbers))
    batches = eval_pipeline(source, global_batch_size=size, replicas=shards.processes)
    laws.every_example_once(batches, examples=(numbers, numbers))
    seen = [int(number) for x, _, weight in batches for number in x[weight > 0]]
    assert seen == [*numbers]
    assert {len(x) for x, *_ in batches} == {size}
    assert len(batches) == -(-shards.examples // size)


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 10, "replicas": 4}, "multiple of `replicas`.* 8 and 12"),
        ({"global_batch_size": 2, "replicas": 4}, "nearest size that works is 4"),
        ({"global_batch_size": 0}, "`global_batch_size` must be a positive.*global_batch_size=0"),
        ({"global_batch_size": 4, "replicas": 0}, "`replicas` must be a positive"),
        ({"global_batch_size": 4, "source": [1, 2]}, "`source` must be a tf.data.Dataset.*'list'"),
        ({"global_batch_size": 4, "keep": lambda number: number > 99}, "No example is left"),
        (
            {"global_batch_size": 4, "source": tf.data.Dataset.range(4).repeat().map(abs)},
            r"`source` repeats.*epochs=N.*Take `.repeat",
        ),
        (
            {"global_batch_size": 4, "source": tf.data.Dataset.range(4).repeat(2)},
            r"`source` repeats",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(build, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**{"source": tf.data.Dataset.range(20), **arguments})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda data: train_pipeline(data, global_batch_size=2, steps_per_epoch=21), "epoch=21"),
        (lambda data: train_pipeline(data, global_batch_size=41), "examples=40"),
        (lambda _: PipelineConfig(shuffle_buffer=-1), "`shuffle_buffer` must be a non-negative"),
        (lambda _: PipelineConfig(seed=2**63), r"`seed` must be below 2\*\*63"),
        (lambda _: PipelineConfig(remainder="split"), "`remainder` must be one of 'drop', 'pad'"),
        (lambda _: PipelineConfig(prefetch=0), "`prefetch` must be a positive integer"),
    ],
)
def test_bad_settings_and_epochs_longer_than_the_data_raise(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tf.data.Dataset.range(40))
