"""What the training step says on JAX, lowered for a TPU on this CPU."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from kdpkit import batches, sharding, testing, training
from kdpkit.diagnostics import check_tpu

pytestmark = pytest.mark.jax

X, Y = testing.toy_classification(64, features=8)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
DATA = batches.ArrayBatches((X, Y), global_batch_size=64)


class Calling(keras.layers.Layer):
    """A user's layer that calls a function."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def with_layer(function):
    layers = [keras.layers.Dense(8), Calling(function, name="planted"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", LOSS, metrics=["accuracy"])
    return model


def with_loss(function):
    model = testing.tiny_classifier(features=8)
    model.compile("adam", function)
    return model


def found(model, dataset=DATA):
    report = check_tpu(dataset, model=model)
    assert report.checked == ("train", "step")
    return [(f.rule, f.level, f.where) for f in report.findings if f.level != "note"]


def on_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kept = jax.pure_callback(np.asarray, shape, jax.lax.stop_gradient(x))
    return x + jax.lax.stop_gradient(kept)


def printing(x):
    jax.debug.print("{}", x[0, 0])
    return x


def eigenvalues(x):
    square = jax.lax.stop_gradient(x[:8, :8])
    return x + jnp.real(jnp.linalg.eigvals(square)).sum()


FAULTS = {
    "pure_callback": (lambda: with_layer(on_host), ("python-op", "slow", "layer planted")),
    "print": (lambda: with_layer(printing), ("python-op", "slow", "layer planted")),
    "no lowering": (lambda: with_layer(eigenvalues), ("xla", "error", "train step")),
    "a shape by values": (
        lambda: with_loss(lambda _, p: jnp.mean(p[p > 0])),
        ("untraceable-step", "error", "train step"),
    ),
    "an if by values": (
        lambda: with_loss(lambda _, p: jnp.mean(p) if float(jnp.sum(p)) > 0 else 0.0),
        ("untraceable-step", "error", "train step"),
    ),
}


@pytest.mark.parametrize(("make", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(make, expected):
    assert found(make()) == [expected]


def test_what_a_tpu_can_do_is_not_found_and_nothing_is_trained():
    model = with_layer(lambda x: jnp.where(x > 0, x, 0) + jnp.nonzero(x, size=4)[0].sum())
    before = model.get_weights()
    assert found(model) == []
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == 0
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    unbuilt = keras.Sequential([*layers, keras.layers.Dense(3)])
    unbuilt.compile("adam", LOSS, metrics=["accuracy"])
    assert found(unbuilt) == []


@pytest.mark.parametrize("replicas", [1, 8])
def test_models_and_loops_over_devices_are_checked(replicas):
    mesh = sharding.data_mesh(replicas)
    loop = training.TrainingLoop(
        testing.tiny_classifier(features=8), optimizer="adam", loss=LOSS, strategy=mesh
    )
    assert found(loop) == []
    keras.distribution.set_distribution(sharding.DataParallel(replicas))
    uneven = batches.ArrayBatches((X, Y), global_batch_size=60)
    try:
        model = with_layer(lambda x: x)
        if replicas == 8:  # before JAX fails on it
            assert found(model, uneven) == [("uneven-batch", "error", "train")]
        assert found(training.replica_exact(model)) == []
    finally:
        keras.distribution.set_distribution(None)
    if replicas == 8:
        assert found(loop, uneven) == [("uneven-batch", "slow", "train")]


@pytest.mark.needs(keras="3.15", reason="`fit` goes on in data whose first batch built the model")
@pytest.mark.parametrize("by", ["fit", "loop", "arrays"])
def test_training_after_a_check_is_what_it_would_have_been(by):
    weights = []
    for is_checked in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile("adam", LOSS)
        trainer, settings = model, {"shuffle": False}
        data = batches.ArrayBatches((X, Y), global_batch_size=32, seed=0)
        if by == "loop":
            trainer, settings = training.TrainingLoop(model, optimizer="adam", loss=LOSS), {}
        elif by == "arrays":
            model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
            data, settings = X, {"y": Y, "batch_size": 8}
        if is_checked:
            checked = (X, Y) if by == "arrays" else data
            check_tpu(checked, model=trainer, replicas=4, batch_size=8)
        trainer.fit(data, epochs=2, verbose=0, **settings)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
