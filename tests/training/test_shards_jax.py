"""Optimizers and weights that are sharded over the devices; test_environments.py runs it on JAX."""

import contextlib
import functools
import math
import re
import warnings

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from keras import layers

from kdpkit import sharding, training
from kdpkit.batches import ArrayBatches
from kdpkit.sharding import _shards as shards
from kdpkit.sharding._batches import place_batch
from kdpkit.sharding._meshes import as_mesh, data_mesh
from kdpkit.testing._toys import off_by

pytestmark = pytest.mark.jax
X = np.random.default_rng(0).normal(size=(52, 64)).astype("float32")
Y = np.random.default_rng(1).integers(0, 10, 52)
EVERYWHERE = PartitionSpec()
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data():
    return ArrayBatches((X, Y), global_batch_size=20, remainder="keep", seed=3)


def net():
    keras.utils.set_random_seed(0)
    first = [layers.Dense(256, "relu"), layers.Dropout(0.3), layers.BatchNormalization()]
    last = [layers.Dense(128, "tanh"), layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *first, *last])


def optimizer(clip=0.5, **settings):
    return keras.optimizers.SGD(0.3, momentum=0.9, global_clipnorm=clip, **settings)


def scope(devices, shard):
    if devices is None:
        return contextlib.nullcontext()
    return sharding.DataParallel(devices, shard=shard).scope()


def by_fit(model, **settings):
    compiled = {"steps_per_execution": settings.pop("steps_per_execution", 1)}
    model.compile(optimizer(**settings), CROSS_ENTROPY, **compiled)
    if keras.distribution.distribution():
        training.replica_exact(model)
    model.fit(data(), epochs=2, shuffle=False, verbose=0)


class OwnStep(keras.Sequential):
    def compute(self, trainable, others, x, y):
        predictions, others = self.stateless_call(trainable, others, x, training=True)
        return CROSS_ENTROPY(y, predictions), others

    def train_step(self, state, batch):
        trainable, others, of_optimizer, metrics = state
        gradient = jax.value_and_grad(self.compute, has_aux=True)
        (loss, others), gradients = gradient(trainable, others, *batch)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, others, of_optimizer, metrics)


def by_own_step(model):
    custom = OwnStep(model.layers)
    custom.build(model.input_shape)
    by_fit(custom)
    model.optimizer = custom.optimizer


def with_frozen_and_low_rank_weights(model):
    model.layers[0].enable_lora(4)
    model.layers[3].trainable = False
    by_fit(model)


@functools.cache
def trained(train, devices=None, shard="none"):
    with scope(devices, shard):
        model = net()
        before = values_of(model)
        train(model)
    return model, before


def values_of(model):
    return {v.path: keras.ops.convert_to_numpy(v.value) for v in model.weights}


def assert_equal(one, many, before):
    after, others = values_of(one), values_of(many)
    start = {**after, **before}  # LoRA's weights are added later
    assert off_by(others.values(), after.values(), start.values()) <= 1e-5


def bytes_here(variables):
    shapes = [v.value.sharding.shard_shape(v.shape) for v in variables]
    return sum(math.prod(shape) for shape in shapes)


# Where variables are sharded.


@pytest.mark.filterwarnings("ignore:A large variable stays complete")
@given(shape=st.lists(st.integers(0, 300), max_size=3).map(tuple), devices=st.integers(1, 8))
def test_the_largest_axis_that_the_devices_divide_is_cut(shape, devices):
    mesh = data_mesh(devices)
    part = shards.Shards("weights", mesh).weight(EVERYWHERE, shape).shard_shape(shape)
    divisible = [size for size in shape if size and size % devices == 0]
    if not divisible or math.prod(shape) < shards.SMALL:
        assert part == shape
    else:
        largest = max(divisible)
        cut = shape.index(largest)
        assert part == (*shape[:cut], largest // devices, *shape[cut + 1 :])
    for kind in ("none", "optimizer"):
        assert shards.Shards(kind, mesh).weight(EVERYWHERE, shape).is_fully_replicated


@pytest.mark.filterwarnings("ignore:A large variable stays complete")
@given(shape=st.lists(st.integers(1, 300), min_size=2, max_size=3).map(tuple), at=st.integers(0, 1))
def test_what_devices_share_is_cut_along_another_axis_over_their_groups(shape, at):
    mesh = as_mesh(sharding.ModelParallel(8, model=2))
    spec = PartitionSpec(*[None] * at, "model")
    shape = tuple(2 * size if axis == at else size for axis, size in enumerate(shape))
    cut = shards.Shards("weights", mesh).weight(spec, shape)
    assert cut.spec[at] == "model"
    divisible = [size for axis, size in enumerate(shape) if axis != at and size % 4 == 0]
    is_cut = divisible and math.prod(shape) // 2 >= shards.SMALL
    assert ("batch" in cut.spec) == bool(is_cut)
    assert math.prod(cut.shard_shape(shape)) * (8 if is_cut else 2) == math.prod(shape)
    assert shards.without_batch(cut.spec, mesh) == spec


def test_large_variables_that_no_axis_lets_be_cut_are_named_once():
    with scope(8, "weights"), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        model = keras.Sequential([keras.Input((75,)), layers.Dense(75), layers.Dense(75)])
        model.compile("adam", "mse")
        model.fit(np.ones((8, 75)), np.ones((8, 75)), verbose=0)
    (warning,) = [w for w in shown if "large variable" in str(w.message)]
    assert "all 8 devices" in str(warning.message)
    assert bytes_here(model.weights) == sum(math.prod(v.shape) for v in model.weights)


# One device against many.


@pytest.mark.parametrize(
    ("train", "shard"),
    [
        (by_fit, "weights"),
        (functools.partial(by_fit, steps_per_execution=2), "weights"),
        (by_fit, "optimizer"),
        (functools.partial(by_fit, gradient_accumulation_steps=2), "weights"),
        (by_own_step, "weights"),
        (with_frozen_and_low_rank_weights, "weights"),
    ],
)
def test_cut_variables_train_as_on_one_device(train, shard):
    one, before = trained(train)
    many, _ = trained(train, 8, shard)
    assert_equal(one, many, before)
    np.testing.assert_allclose(many.predict(X, verbose=0), one.predict(X, verbose=0), atol=1e-3)
    large = [v for v in many.weights if math.prod(v.shape) >= shards.SMALL]
    slots = [v for v in many.optimizer.variables if math.prod(v.shape) >= shards.SMALL]
    assert len(large) == 2
    assert bytes_here(slots) == sum(math.prod(v.shape) for v in slots) / 8
    total = sum(math.prod(v.shape) for v in large)
    assert bytes_here(large) == (total / 8 if shard == "weights" else total)


def test_masks_reach_the_loss_of_cut_weights(monkeypatch):
    monkeypatch.setattr("kdpkit.sharding._shards.SMALL", 10)
    tokens = np.random.default_rng(0).integers(0, 12, (16, 6))
    tokens[::2, 3:] = 0  # padding

    def losses(devices):
        with scope(devices, "weights"):
            keras.utils.set_random_seed(0)
            embedding = layers.Embedding(12, 16, mask_zero=True)
            model = keras.Sequential([keras.Input((6,)), embedding, layers.Dense(12)])
            model.compile("sgd", CROSS_ENTROPY)
            model = training.replica_exact(model) if devices else model
            return model.fit(tokens, tokens, batch_size=8, shuffle=False, verbose=0).history["loss"]

    assert losses(4) == pytest.approx(losses(None), rel=1e-6)


def test_the_variables_of_a_model_that_was_built_before_are_cut():
    one, before = trained(by_fit)
    many = net()
    with scope(4, "weights"):
        by_fit(many)
    assert_equal(one, many, before)
    assert many.weights[0].value.sharding.shard_shape((64, 256)) == (64, 64)


# What XLA makes of it.


# Schedules a step as accelerators do: on CPUs XLA gathers everything first, to be fast.
BY_MEMORY = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,while-loop-invariant-code-motion",
}


for_memory = pytest.mark.needs(jax="0.10", reason="schedules for memory on a CPU")


def step_of_fit(model):
    model.compile(optimizer(clip=None), CROSS_ENTROPY)
    model.optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([v.value for v in group] for group in groups)
    placed = jax.tree.map(lambda value: value.sharding, state)
    return jax.jit(model.train_step, out_shardings=(None, placed), donate_argnums=0), state


def compiled(model):
    step, state = step_of_fit(model)
    batch = place_batch((X[:48], Y[:48]), as_mesh(None))
    return step.lower(state, batch).compile(compiler_options=BY_MEMORY)


@for_memory
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_step_gathers_weights_and_no_activations(shard):
    with scope(8, shard):
        model = net()
        program = compiled(model)
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather", program.as_text())
    weights = {frozenset(v.shape) for v in model.trainable_variables}
    shapes = {frozenset(map(int, shape.split(","))) for shape in gathered}
    assert shapes
    assert shapes <= weights
    whole = 4 * sum(math.prod(v.shape) for v in model.variables + model.optimizer.variables)
    arguments = program.memory_analysis().argument_size_in_bytes
    assert arguments < (0.2 if shard == "weights" else 0.6) * whole


@for_memory
@pytest.mark.parametrize(
    ("prepare", "precision"),
    [(lambda model: model, "float32"), (training.remat, "mixed_bfloat16")],
)
def test_a_step_holds_few_weights_at_a_time(prepare, precision):
    with scope(8, "weights"):
        hidden = [
            keras.Sequential([layers.Dense(256, activation="tanh", dtype=precision)])
            for _ in range(8)
        ]
        model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
        program = compiled(prepare(model))
    one = 4 * 256 * 256
    assert program.memory_analysis().temp_size_in_bytes < 5 * one


# Saved and gone on with.


def test_a_cut_model_is_saved_and_loaded_cut_or_on_one_device(tmp_path):
    model, _ = trained(by_fit, 8, "weights")
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    alone = keras.saving.load_model(tmp_path / "model.keras")
    with scope(4, "weights"):
        cut = net()
        cut.load_weights(tmp_path / "model.weights.h5")
    for other in (alone, cut):
        np.testing.assert_equal(model.get_weights(), other.get_weights())
    assert cut.weights[0].value.sharding.shard_shape((64, 256)) == (64, 64)


# Bad input.


def test_another_way_to_cut_raises():
    with pytest.raises(ValueError, match="`shard` must be one of .*'rows'"):
        sharding.DataParallel(2, shard="rows")
