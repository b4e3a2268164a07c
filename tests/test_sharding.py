"""Meshes, sharded batches and the training step on JAX; test_environments.py runs it there."""

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from kdpkit import scaling, sharding, testing

pytestmark = pytest.mark.jax


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# Meshes.


def test_a_mesh_takes_all_devices_a_number_or_a_choice_of_them():
    assert sharding.data_mesh().size == 8
    assert [*sharding.data_mesh(3).devices.flat] == jax.devices()[:3]
    chosen = [jax.devices()[5], jax.devices()[2]]
    assert [*sharding.data_mesh(chosen).devices.flat] == chosen


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (0, "`devices` must be a positive integer.*devices=0"),
        (9, r"JAX has 8 cpu device\(s\).*devices=9.*device_count=9"),
        ([], "at least one and none twice"),
        ("cpu", "`devices` must be a positive integer.*'cpu'"),
        ([0, 1], r"devices of `jax.devices\(\)`.*\[0, 1\]"),
        (2.5, "`devices` must be a positive integer.*2.5"),
    ],
)
def test_impossible_meshes_are_refused(devices, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.data_mesh(devices)


def test_a_device_counts_once():
    with pytest.raises(ValueError, match="none twice"):
        sharding.data_mesh([jax.devices()[0]] * 2)


def test_a_strategy_is_a_mesh_or_a_distribution_or_what_keras_has_set():
    mesh = sharding.data_mesh(2)
    assert sharding.as_mesh(mesh) is mesh
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1", "cpu:2"])
    assert sharding.as_mesh(distribution).size == 3
    with distribution.scope():
        assert sharding.as_mesh(None).size == 3
    assert sharding.as_mesh(None).size == 1
    two_axes = Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model"))
    for wrong in ("mirrored", two_axes):
        with pytest.raises(ValueError, match="a strategy is a `jax.sharding.Mesh` of one axis"):
            sharding.as_mesh(wrong)


# Batches.


@settings(max_examples=30)
@given(rows=st.integers(1, 24), devices=st.integers(1, 8))
def test_pieces_of_an_uneven_batch_are_those_of_tf_distribute(rows, devices):
    mesh = sharding.data_mesh(devices)
    x = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
    placed = sharding.place_batch(x, mesh)
    np.testing.assert_array_equal(placed, x)
    if rows % devices == 0:
        shards = sorted(placed.addressable_shards, key=lambda shard: shard.device.id)
        assert tuple(len(s.data) for s in shards) == scaling.split_batch(rows, devices)
        np.testing.assert_array_equal(np.concatenate([s.data for s in shards]), x)


def test_a_batch_is_cut_along_its_rows_and_says_so():
    mesh = sharding.data_mesh(4)
    x, y = sharding.shard_batch((np.zeros((8, 3)), np.zeros(8, int)), mesh)
    assert [shard.data.shape for shard in x.addressable_shards] == [(2, 3)] * 4
    lines = sharding.describe_placement((x, y)).splitlines()
    assert lines[0].endswith(
        "(8, 3): cpu:0 rows 0-1, cpu:1 rows 2-3, cpu:2 rows 4-5, cpu:3 rows 6-7"
    )
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (np.zeros(6), r"multiple of `replicas`.*Received: global_batch_size=6.* 4 and 8"),
        ((np.zeros(8), np.zeros(4)), r"same rows.*\(8,\), \(4,\)"),
        ((np.zeros(8), 3.0), "same rows"),
        (np.zeros((0, 2)), "at least one"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.shard_batch(batch, sharding.data_mesh(4))


def test_padding_fills_up_to_the_devices_or_to_one_size():
    mesh = sharding.data_mesh(4)
    x, y, weight = sharding.shard_batch(np.arange(6.0), mesh, pad="eval")
    assert (x.shape, y, weight.tolist()) == ((8,), None, [1.0] * 6 + [0.0] * 2)
    x, _, _ = sharding.shard_batch(np.arange(6.0), mesh, pad="train", global_batch_size=12)
    assert x.shape == (12,)
    with pytest.raises(ValueError, match="more rows than `global_batch_size`"):
        sharding.shard_batch(np.arange(6.0), mesh, pad="eval", global_batch_size=4)
    with pytest.raises(ValueError, match="`global_batch_size` must be a positive integer"):
        sharding.shard_batch(np.arange(6.0), mesh, pad="eval", global_batch_size=0)


# Training.


def regularized():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_a_step_is_that_of_keras_fit_on_one_device(devices):
    x, y = testing.toy_classification(48)
    model = regularized()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    expected = model.fit(x, y, batch_size=24, epochs=1, shuffle=False, verbose=0).history

    ours, optimizer, mesh = regularized(), keras.optimizers.Adam(), sharding.data_mesh(devices)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    state = sharding.TrainState.replicated(ours, optimizer, mesh, metrics=metrics)
    step = sharding.make_train_step(ours, optimizer, crossentropy(), metrics=metrics)
    losses = []
    for start in (0, 24):
        batch = sharding.shard_batch((x[start : start + 24], y[start : start + 24]), mesh)
        state, logs = step(state, batch)
        losses.append(float(logs["loss"]))
    state.write_back(ours, optimizer, metrics=metrics)
    assert np.mean(losses) == pytest.approx(expected["loss"][0], rel=1e-6)
    assert float(metrics[0].result()) == pytest.approx(expected["accuracy"][0])
    assert int(optimizer.iterations.value) == 2
    variables = zip(
        ours.variables + optimizer.variables,
        model.variables + model.optimizer.variables,
        strict=True,
    )
    for one, other in variables:  # batch statistics, seeds and Adam's moments too
        np.testing.assert_allclose(one.value, other.value, atol=1e-6)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "mse"])
def test_losses_may_be_named(loss):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    optimizer, mesh = keras.optimizers.SGD(), sharding.data_mesh(2)
    state = sharding.TrainState.replicated(model, optimizer, mesh)
    x, y = testing.toy_classification(4)
    y = np.eye(3, dtype="float32")[y] if loss == "mse" else y
    _, logs = sharding.make_train_step(model, optimizer, loss)(
        state, sharding.shard_batch((x, y), mesh)
    )
    expected = keras.ops.mean(keras.losses.get(loss)(y, model(x)))
    assert float(logs["loss"]) == pytest.approx(float(expected), rel=1e-6)


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="no variables yet; build it"):
        sharding.TrainState.replicated(model, keras.optimizers.SGD(), sharding.data_mesh(2))


def test_the_models_own_arrays_stay_when_the_state_is_used_up():
    model, optimizer, mesh = regularized(), keras.optimizers.Adam(), sharding.data_mesh(2)
    before = model.get_weights()
    state = sharding.TrainState.replicated(model, optimizer, mesh)
    step = sharding.make_train_step(model, optimizer, crossentropy())
    step(state, sharding.shard_batch(testing.toy_classification(4), mesh))
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


# Processes; tests/test_processes.py starts real ones.


@pytest.mark.parametrize(
    ("joining", "sentence"),
    [
        ({"coordinator": "localhost"}, "`coordinator` must be the address and port.*'localhost'"),
        ({"coordinator": "http://localhost:80"}, "`coordinator` must be the address and port"),
        ({"coordinator": None}, "`coordinator` must be the address and port"),
        ({"process_index": 2}, "`process_index` must be less than `process_count`"),
        ({"process_count": 0}, "`process_count` must be a positive integer"),
        ({"heartbeat_timeout_seconds": 0.5}, "`heartbeat_timeout_seconds` must be a positive"),
    ],
)
def test_impossible_places_among_processes_are_refused(joining, sentence):
    place = {"coordinator": "localhost:9876", "process_count": 2, "process_index": 0}
    with pytest.raises(ValueError, match=sentence):
        sharding.join_processes(**place | joining)
