import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import scaling, schedules, strategies
from kdpkit.testing import generators, laws


@functools.cache
def mirrored(replicas):
    return strategies.select_strategy("mirrored", devices=replicas)


@settings(max_examples=6)
@given(
    st.integers(1, 4),
    generators.example_counts(min_value=1, max_value=12),
    generators.example_counts(min_value=1, max_value=24),
)
def test_batches_are_split_as_the_real_strategy_splits_them(replicas, global_batch_size, examples):
    strategy = mirrored(replicas)
    dataset = tf.data.Dataset.range(examples).batch(global_batch_size)
    read = list(strategy.experimental_distribute_dataset(dataset))
    laws.every_example_once(iter(read), examples=examples)
    for batch, given_batch in zip(read, dataset, strict=True):
        parts = strategy.experimental_local_results(batch)
        sizes = scaling.split_batch(len(given_batch), replicas)
        assert sizes == tuple(map(len, parts))


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 300), st.integers(1, 3), st.booleans())
def test_a_plan_counts_what_a_run_would_do(replicas, per_replica, examples, epochs, drop_remainder):
    plan = plan_with(replicas=replicas, per_replica_batch_size=per_replica)
    size = replicas * per_replica
    batches = [min(size, examples - start) for start in range(0, examples, size)] * epochs
    steps = sum(found == size or not drop_remainder for found in batches)
    run = {"epochs": epochs, "drop_remainder": drop_remainder}
    if steps == 0:
        with pytest.raises(ValueError, match=f"At least {size} are needed"):
            plan.total_steps(examples, **run)
        return
    assert plan.total_steps(examples, **run) == steps
    assert plan.steps_per_epoch(examples, drop_remainder=drop_remainder) == steps / epochs


def test_a_plan_counts_the_updates_and_schedule_steps_of_a_real_fit():
    plan = scaling.ScalePlan(
        replicas=1, per_replica_batch_size=2, base_learning_rate=0.1, accumulation=3
    )
    run = {"epochs": 2, "drop_remainder": False}
    schedule = schedules.warmup_polynomial(
        plan.learning_rate, total_steps=plan.total_steps(13, **run)
    )
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=plan.accumulation)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    model.compile(optimizer, loss=lambda _, predictions: tf.reduce_mean(predictions, axis=-1))
    ones = np.ones((13, 1), "float32")
    model.fit(ones, ones, batch_size=plan.global_batch_size, epochs=2, verbose=0)

    assert plan.total_steps(13, **run) == 14
    assert int(optimizer.iterations) == 4
    assert float(optimizer.learning_rate) == 0.0
    applied = [float(schedule(update * 3 + 2)) for update in range(4)]
    np.testing.assert_allclose(model.layers[0].kernel.numpy().item(), -sum(applied), rtol=1e-5)


@given(st.floats(0.01, 1.0), st.floats(0.1, 16), st.floats(0.1, 16), st.sampled_from(scaling.RULES))
def test_scaling_twice_is_scaling_by_the_product(base, first, second, rule):
    once = scaling.scale_learning_rate(base, factor=first * second, rule=rule)
    halfway = scaling.scale_learning_rate(base, factor=first, rule=rule)
    assert scaling.scale_learning_rate(halfway, factor=second, rule=rule) == pytest.approx(once)


def plan_with(**changes):
    arguments = {"replicas": 2, "per_replica_batch_size": 8, "base_learning_rate": 0.1}
    return scaling.ScalePlan(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: plan_with(replicas=0), "`replicas`.*0"),
        (lambda: plan_with(rule="cubic"), "`rule`.*'cubic'"),
    ],
)
def test_bad_arguments_get_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
