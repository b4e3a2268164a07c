import dataclasses
import functools
import itertools

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


@settings(max_examples=10)
@given(
    generators.splits(min_size=1, max_size=12, max_replicas=4),
    generators.example_counts(min_value=1, max_value=24),
)
def test_batches_are_split_as_the_real_strategy_splits_them(split, examples):
    strategy = mirrored(split.replicas)
    dataset = tf.data.Dataset.range(examples).batch(split.global_batch_size)
    read = list(strategy.experimental_distribute_dataset(dataset))
    laws.every_example_once(iter(read), examples=examples)
    for batch, given_batch in zip(read, dataset, strict=True):
        parts = strategy.experimental_local_results(batch)
        sizes = scaling.split_batch(len(given_batch), split.replicas)
        assert sizes == tuple(map(len, parts))


@given(generators.shards(), st.sampled_from(["balance", "drop"]))
def test_shards_hold_every_example_once_in_order_but_for_what_is_dropped(shards, remainder):
    examples, _, processes = shards
    dealt = [
        list(scaling.shard_indices(examples, processes, index, remainder=remainder))
        for index in range(processes)
    ]
    kept = examples if remainder == "balance" else examples // processes * processes
    assert list(itertools.chain(*dealt)) == list(range(kept))
    sizes = [len(shard) for shard in dealt]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= (remainder == "balance")


@given(
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_plan_counts_what_a_run_would_do(
    replicas, per_replica, accumulation, examples, epochs, drop_remainder
):
    plan = scaling.ScalePlan(
        replicas=replicas,
        per_replica_batch_size=per_replica,
        base_learning_rate=0.1,
        accumulation=accumulation,
    )
    batches = [
        len(range(start, min(start + replicas * per_replica, examples)))
        for _ in range(epochs)
        for start in range(0, examples, replicas * per_replica)
    ]
    steps = sum(size == replicas * per_replica or not drop_remainder for size in batches)
    updates = len(range(accumulation - 1, steps, accumulation))
    run = {"epochs": epochs, "drop_remainder": drop_remainder}
    if steps == 0:
        with pytest.raises(ValueError, match=f"At least {replicas * per_replica} are needed"):
            plan.total_steps(examples, **run)
        return
    assert plan.total_steps(examples, **run) == steps
    assert plan.steps_per_epoch(examples, drop_remainder=drop_remainder) == steps / epochs
    if updates == 0:
        with pytest.raises(ValueError, match="before the first update"):
            plan.updates(examples, **run)
        return
    assert plan.updates(examples, **run) == updates


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
    assert int(optimizer.iterations) == plan.updates(13, **run) == 4
    assert float(optimizer.learning_rate) == 0.0
    applied = [float(schedule(update * 3 + 2)) for update in range(4)]
    np.testing.assert_allclose(model.layers[0].kernel.numpy().item(), -sum(applied), rtol=1e-5)


def test_a_plan_is_plain_data():
    plan = scaling.ScalePlan(
        replicas=np.int64(2), per_replica_batch_size=np.int32(3), base_learning_rate=np.float64(1)
    )
    kinds = [type(value) for value in dataclasses.asdict(plan).values()]
    assert kinds == [int, int, float, str, int]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.replicas = 3


@given(st.floats(0.01, 1.0), st.floats(0.1, 16), st.floats(0.1, 16), st.sampled_from(scaling.RULES))
def test_scaling_twice_is_scaling_by_the_product(base, first, second, rule):
    once = scaling.scale_learning_rate(base, factor=first * second, rule=rule)
    halfway = scaling.scale_learning_rate(base, factor=first, rule=rule)
    assert scaling.scale_learning_rate(halfway, factor=second, rule=rule) == pytest.approx(once)


def test_adam_by_hand_is_what_keras_takes():
    scaled = scaling.scale_adam(1e-3, factor=4, epsilon=1e-8)
    expected = {"learning_rate": 2e-3, "beta_1": 0.6, "beta_2": 0.996, "epsilon": 5e-9}
    assert dataclasses.asdict(scaled) == pytest.approx(expected)
    assert keras.optimizers.Adam(**dataclasses.asdict(scaled)).beta_1 == scaled.beta_1
    assert scaling.scale_adam(1e-3, factor=10).beta_1 == 0.0


def plan_with(**changes):
    arguments = {"replicas": 2, "per_replica_batch_size": 8, "base_learning_rate": 0.1}
    return scaling.ScalePlan(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: scaling.shard_indices(4, 2, 2), "`index` must be less than.*index=2, shards=2"),
        (lambda: scaling.shard_indices(4, 2, 1, remainder="keep"), "`remainder`.*'keep'"),
        (lambda: plan_with(replicas=0), "`replicas`.*0"),
        (lambda: plan_with(rule="cubic"), "`rule`.*'cubic'"),
        (lambda: scaling.scale_adam(1e-3, factor=10.1), "moves `beta_1` out.*=10.1.*at most 10"),
    ],
)
def test_bad_arguments_get_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
