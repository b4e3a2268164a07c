import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit.pipelines import PipelineConfig, eval_pipeline, train_pipeline
from kdpkit.testing import generators, laws

FEW = settings(max_examples=8)  # each builds pipelines


def test_a_cache_after_shuffling_keeps_one_order_and_one_before_it_does_not():
    def orders(dataset):
        return len({tuple(map(int, dataset)) for _ in range(2)})

    numbers = tf.data.Dataset.range(50)
    assert orders(numbers.shuffle(50, seed=1).cache()) == 1
    assert orders(numbers.cache().shuffle(50, seed=1)) == 2


@settings(max_examples=10)
@given(examples=st.integers(5, 30), size=st.integers(1, 3), cache=st.booleans())
def test_counting_finds_what_filter_hides(examples, size, cache):
    numbers = tf.data.Dataset.range(examples)
    even = numbers.filter(lambda number: number % 2 == 0)
    assert (even.cache() if cache else even).cardinality() == tf.data.UNKNOWN_CARDINALITY
    config = PipelineConfig(cache=cache)
    assert len(train_pipeline(even, config, global_batch_size=size)) == -(-examples // 2) // size


def numbers(batches):
    return [int(number) for batch in batches for number in batch]


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


@settings(max_examples=4)
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
@given(shards=generators.shards(min_examples=1), remainder=st.sampled_from(["keep", "pad"]))
def test_evaluation_sees_every_example_once_in_order(shards, remainder):
    size, numbers = shards.global_batch_size, np.arange(shards.examples)
    source = tf.data.Dataset.from_tensor_slices((numbers, numbers))
    settings_ = {"global_batch_size": size, "replicas": shards.processes, "remainder": remainder}
    batches = eval_pipeline(source, **settings_)
    laws.every_example_once(batches, examples=(numbers, numbers))
    weights = [weight for *_, weight in batches] if remainder == "pad" else None
    seen = np.concatenate([x for x, *_ in batches])
    if weights is not None:
        assert {len(weight) for weight in weights} == {size}
        assert np.mean(weights) == pytest.approx(1)
        seen = seen[np.concatenate(weights) > 0]
    assert [*seen] == [*numbers]
    assert len(batches) == -(-shards.examples // size)


@pytest.mark.parametrize("build", [train_pipeline, eval_pipeline])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 10, "replicas": 4}, "multiple of `replicas`.* 8 and 12"),
        ({"source": [1, 2]}, "`source` must be a tf.data.Dataset.*'list'"),
        ({"source": "data/*"}, "need a function that reads.*source='data/.*Pass `read`"),
        ({"keep": lambda number: number > 99}, "too few examples.*examples=0"),
        ({"source": tf.data.Dataset.range(4).repeat(2).map(abs)}, r"`source` repeats.*`.repeat"),
        ({"source": tf.data.Dataset.range(4).repeat().filter(lambda n: n > 1)}, "`source` repeats"),
    ],
)
def test_bad_arguments_get_one_sentence(build, arguments, sentence):
    arguments = {"source": tf.data.Dataset.range(20), "global_batch_size": 4, **arguments}
    with pytest.raises(ValueError, match=sentence):
        build(**arguments)


def test_bad_settings_and_epochs_longer_than_the_data_raise():
    with pytest.raises(ValueError, match="`cache` must be one of True, False.*'directory'"):
        PipelineConfig(cache="directory")
    with pytest.raises(ValueError, match="`shuffle_buffer` must be a non-negative"):
        PipelineConfig(shuffle_buffer=-1)
    numbers = tf.data.Dataset.range(40)
    with pytest.raises(ValueError, match="epoch=21"):
        train_pipeline(numbers, global_batch_size=2, steps_per_epoch=21)
    with pytest.raises(ValueError, match="examples=40"):
        train_pipeline(numbers, global_batch_size=41)
