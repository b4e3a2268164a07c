import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import strategies, testing
from kdpkit.pipelines import PipelineConfig, eval_pipeline, train_pipeline

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


@pytest.mark.slow
@FEW
@given(
    examples=st.integers(4, 60),
    per_replica=st.integers(1, 4),
    replicas=st.integers(1, 4),
    buffer=st.sampled_from([0, 3, 1000]),
    cache=st.sampled_from(["memory", None]),
)
def test_every_kept_example_comes_exactly_once_an_epoch(
    examples, per_replica, replicas, buffer, cache
):
    config = PipelineConfig(shuffle_buffer=buffer, remainder="keep", cache=cache)
    train = train_pipeline(
        tf.data.Dataset.range(examples),
        config,
        global_batch_size=per_replica * replicas,
        replicas=replicas,
        keep=lambda number: number % 3 != 1,
        prepare=lambda number: number * 10,
    )
    kept = [number * 10 for number in range(examples) if number % 3 != 1]
    for _ in range(3):
        assert sorted(numbers(train)) == kept


@pytest.mark.slow
@FEW
@given(examples=st.integers(8, 60), seed=st.integers(0, 2**40), buffer=st.integers(2, 100))
def test_orders_are_new_each_epoch_and_the_same_for_the_same_seed(examples, seed, buffer):
    def three_epochs():
        config = PipelineConfig(shuffle_buffer=buffer, seed=seed)
        train = train_pipeline(tf.data.Dataset.range(examples), config, global_batch_size=1)
        return [tuple(numbers(train)) for _ in range(3)]

    epochs = three_epochs()
    assert epochs == three_epochs()
    if buffer > 7:
        assert len(set(epochs)) == 3


def test_the_order_does_not_depend_on_the_programs_global_seed():
    orders = set()
    for global_seed in (1, 2):
        tf.random.set_seed(global_seed)
        train = train_pipeline(tf.data.Dataset.range(50), global_batch_size=5)
        orders.add(tuple(numbers(train)))
    assert len(orders) == 1


@pytest.mark.slow
@FEW
@given(epoch=st.integers(0, 3), step=st.integers(0, 6), remainder=st.sampled_from(["drop", "keep"]))
def test_a_resumed_pipeline_goes_on_where_it_stopped(epoch, step, remainder):
    def noisy(batch, seed):
        return batch * 1000 + tf.random.stateless_uniform(tf.shape(batch), seed, 0, 999, tf.int64)

    def build(**start):
        config = PipelineConfig(seed=7, remainder=remainder)
        source = tf.data.Dataset.range(23)
        return train_pipeline(source, config, global_batch_size=4, augment=noisy, **start)

    complete = build()
    epochs = [[batch.numpy().tolist() for batch in complete] for _ in range(epoch + 3)]
    resumed = build(initial_epoch=epoch, initial_step=step)
    complete_epochs, step = divmod(step, len(epochs[0]))
    first, second = epochs[epoch + complete_epochs :][:2]
    for batches in (first[step:], second):
        assert [batch.numpy().tolist() for batch in resumed] == batches


def test_augmentation_is_fresh_each_epoch_and_seeded():
    def build(seed):
        def draw(batch, batch_seed):
            return tf.random.stateless_uniform(tf.shape(batch), batch_seed, 0, 10**9, tf.int64)

        config = PipelineConfig(seed=seed, shuffle_buffer=0)
        return train_pipeline(tf.data.Dataset.range(12), config, global_batch_size=4, augment=draw)

    train = build(seed=1)
    first, second = numbers(train), numbers(train)
    assert len(set(first + second)) == 24
    assert numbers(build(seed=1)) == first
    assert not set(numbers(build(seed=2))) & set(first)


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
    options = tf.data.Options()
    options.deterministic = False
    strategy = strategies.select_strategy("mirrored", devices=1)
    total = tf.function(
        lambda batches: batches.reduce(np.int64(0), lambda a, b: a + tf.reduce_sum(b))
    )
    assert build().element_spec.shape == (4,)  # static, for XLA and TPUs
    assert len(build().with_options(options)) == len(build().prefetch(1)) == 2
    assert numbers(build().with_options(options)) == epoch
    assert numbers(build().map(lambda batch: batch + 1).prefetch(1)) == [n + 1 for n in epoch]
    assert numbers(strategy.experimental_distribute_dataset(build())) == epoch
    assert int(total(build())) == sum(epoch)


@pytest.mark.slow
def test_fit_sees_the_same_epochs_on_one_device_and_on_replicas():
    x, y = testing.toy_classification(20)

    def build(replicas):
        source = tf.data.Dataset.from_tensor_slices((x, y))
        config = PipelineConfig(prefetch=8)
        return train_pipeline(source, config, global_batch_size=4, replicas=replicas)

    one = weights_after_fit(build(1), 1, epochs=3)
    for replicas in (2, 4):
        many = weights_after_fit(build(replicas), replicas, epochs=3)
        np.testing.assert_allclose(many, one, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cache", ["memory", None])
def test_the_epochs_of_fit_are_the_epochs_of_a_plain_loop(cache):
    seen = []

    class Recorder(keras.Model):
        def train_step(self, batch):
            tf.py_function(lambda numbers: seen.extend(numbers.numpy().tolist()), [batch], [])
            return {"examples": tf.size(batch)}

        def call(self, inputs):
            return inputs

    def build():
        config = PipelineConfig(cache=cache)
        source = tf.data.Dataset.range(40)
        return train_pipeline(source, config, global_batch_size=2, keep=lambda n: n % 2 == 0)

    model = Recorder()
    model.compile()
    model.fit(build(), epochs=3, verbose=0)
    loop = build()
    assert len(loop) == 10
    assert seen == [number for _ in range(3) for number in numbers(loop)]


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


def test_training_and_evaluation_may_use_one_cache_directory(tmp_path):
    config = PipelineConfig(cache=tmp_path, shuffle_buffer=2**62)
    train = train_pipeline(tf.data.Dataset.range(8), config, global_batch_size=4)
    evaluate = eval_pipeline(tf.data.Dataset.range(100, 104), config, global_batch_size=4)
    assert sorted(numbers(train)) == list(range(8))
    assert [x.numpy().tolist() for x, *_ in evaluate] == [[100, 101, 102, 103]]


def test_a_padded_training_remainder_averages_over_the_real_examples():
    x, y = testing.toy_classification(7)
    source = tf.data.Dataset.from_tensor_slices((x, y))
    config = PipelineConfig(shuffle_buffer=0, remainder="pad")
    padded = train_pipeline(source, config, global_batch_size=8, replicas=2)
    plain = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    np.testing.assert_allclose(
        weights_after_fit(padded, 2), weights_after_fit(plain, 1), rtol=0, atol=1e-6
    )


@FEW
@given(examples=st.integers(1, 30), per_replica=st.integers(1, 5), replicas=st.integers(1, 4))
def test_evaluation_sees_every_example_once_in_order(examples, per_replica, replicas):
    size = per_replica * replicas
    source = tf.data.Dataset.range(examples).map(lambda number: (number, number))
    batches = eval_pipeline(source, global_batch_size=size, replicas=replicas)
    seen = []
    for x, y, weight in batches:
        assert x.shape == y.shape == weight.shape == (size,)
        seen += [int(number) for number, real in zip(x, weight, strict=True) if real]
    assert seen == list(range(examples))
    assert len(batches) == -(-examples // size)


@pytest.mark.slow
def test_padded_evaluation_on_replicas_equals_plain_evaluation():
    x, y = testing.toy_classification(13)
    source = tf.data.Dataset.from_tensor_slices((x, y))

    def accuracy(dataset, replicas):
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            model = testing.tiny_classifier()
            model.compile(
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=[
                    keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                    keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="mean"),
                ],
            )
        results = model.evaluate(dataset, return_dict=True, verbose=0)
        return [results["accuracy"], results["mean"]]

    padded = eval_pipeline(source, global_batch_size=8, replicas=4)
    np.testing.assert_allclose(accuracy(padded, 4), accuracy(source.batch(13), 1), rtol=1e-6)


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 10, "replicas": 4}, "multiple of `replicas`.* 8 and 12"),
        ({"global_batch_size": 2, "replicas": 4}, "nearest size that works is 4"),
        ({"global_batch_size": 0}, "`global_batch_size` must be a positive.*global_batch_size=0"),
        ({"global_batch_size": -8, "replicas": 2}, "`global_batch_size` must be a positive"),
        ({"global_batch_size": 4, "replicas": 0}, "`replicas` must be a positive"),
        ({"global_batch_size": 4, "source": [1, 2]}, "`source` must be a tf.data.Dataset.*'list'"),
        ({"global_batch_size": 4, "keep": lambda number: number > 99}, "No example is left"),
    ],
)
def test_bad_arguments_get_one_sentence(build, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(**{"source": tf.data.Dataset.range(20), **arguments})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"steps_per_epoch": 21}, "20. Received: steps_per_epoch=21"),
        ({"source": tf.data.Dataset.range(1)}, "examples=1, global_batch_size=2"),
        ({"initial_step": -1}, "`initial_step` must be a non-negative"),
    ],
)
def test_an_epoch_that_the_data_cannot_give_raises(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_pipeline(**{"source": tf.data.Dataset.range(40), "global_batch_size": 2, **arguments})


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
@pytest.mark.parametrize("count", [None, 2])
def test_a_repeating_source_raises(build, count):
    source = tf.data.Dataset.range(4).repeat(count).map(lambda number: number)
    with pytest.raises(ValueError, match=r"`source` repeats.*epochs=N.*Take `.repeat"):
        build(source, global_batch_size=2)


def test_shorter_epochs_are_still_new_each_time():
    train = train_pipeline(tf.data.Dataset.range(40), global_batch_size=2, steps_per_epoch=3)
    epochs = [tuple(numbers(train)) for _ in range(3)]
    assert len(train) == 3
    assert [len(set(epoch)) for epoch in epochs] == [6, 6, 6]
    assert len(set(epochs)) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"shuffle_buffer": -1}, "`shuffle_buffer` must be a non-negative.*shuffle_buffer=-1"),
        ({"seed": 2**63}, r"`seed` must be below 2\*\*63"),
        ({"seed": 0.5}, "`seed` must be a non-negative integer.*seed=0.5"),
        ({"remainder": "split"}, "`remainder` must be one of 'drop', 'pad', 'keep'"),
        ({"prefetch": 0}, "`prefetch` must be a positive integer"),
    ],
)
def test_bad_settings_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        PipelineConfig(**arguments)
