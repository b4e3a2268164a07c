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


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.head = keras.layers.Dense(3)

    def call(self, x):
        return self.head(self.dense(x))


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


@pytest.mark.parametrize(
    ("function", "rule", "level"),
    [
        (on_host, "python-op", "slow"),
        (printing, "python-op", "slow"),
        (eigenvalues, "xla", "error"),
    ],
    ids=["pure_callback", "print", "no lowering"],
)
def test_a_fault_in_a_layer_is_found_and_the_layer_named(function, rule, level):
    assert found(with_layer(function)) == [(rule, level, "layer planted")]


@pytest.mark.parametrize(
    "function",
    [
        lambda _, p: jnp.mean(p[p > 0]),
        lambda _, p: jnp.mean(p) + jnp.where(p > 0)[0][0],
        lambda _, p: jnp.mean(jnp.unique(p)),
    ],
    ids=["boolean mask", "where", "unique"],
)
def test_shapes_that_depend_on_values_are_found(function):
    assert found(with_loss(function)) == [("dynamic-shape", "error", "train step")]


def test_a_layer_that_makes_such_a_shape_in_training_is_named():
    class Dynamic(keras.layers.Layer):
        def call(self, x, training=False):
            return x + jnp.sum(x[x > 0]) if training else x

    layers = [keras.Input((8,)), Dynamic(name="planted"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", LOSS)
    assert found(model) == [("dynamic-shape", "error", "layer planted")]


def test_a_step_that_cannot_be_traced_is_a_finding_with_the_error():
    model = with_loss(lambda _, p: jnp.mean(p) if float(jnp.sum(p)) > 0 else 0.0)
    (finding,) = check_tpu(DATA, model=model).findings
    assert finding.rule == "untraceable-step"
    assert "ConcretizationTypeError" in finding.problem


def test_what_a_tpu_can_do_is_not_found_and_nothing_is_trained():
    model = with_layer(lambda x: jnp.where(x > 0, x, 0) + jnp.nonzero(x, size=4)[0].sum())
    before = model.get_weights()
    report = check_tpu(DATA, model=model)
    assert report.clean
    assert report.findings == ()
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == 0


def test_dropout_normalization_and_models_that_are_not_built_are_clean():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    for model in (Subclassed(), keras.Sequential([*layers, keras.layers.Dense(3)])):
        model.compile("adam", LOSS, metrics=["accuracy"])
        assert found(model) == []


@pytest.mark.parametrize("replicas", [1, 8])
def test_models_and_loops_over_devices_are_checked(replicas):
    mesh = sharding.data_mesh(replicas)
    loop = training.TrainingLoop(
        testing.tiny_classifier(features=8), optimizer="adam", loss=LOSS, strategy=mesh
    )
    assert found(loop) == []
    keras.distribution.set_distribution(sharding.DataParallel(replicas))
    try:
        model = with_layer(lambda x: x)
        assert found(model) == []
        assert found(training.replica_exact(model)) == []
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.needs(keras="3.15", reason="`fit` goes on in data whose first batch built the model")
@pytest.mark.parametrize("is_loop", [False, True])
def test_training_after_a_check_is_what_it_would_have_been(is_loop):
    weights = []
    for is_checked in (False, True):
        model = testing.tiny_classifier(features=8)
        model.compile("adam", LOSS)
        trainer = training.TrainingLoop(model, optimizer="adam", loss=LOSS) if is_loop else model
        data = batches.ArrayBatches((X, Y), global_batch_size=32, seed=0)
        if is_checked:
            check_tpu(data, model=trainer, replicas=4)
        trainer.fit(data, epochs=2, verbose=0, **({} if is_loop else {"shuffle": False}))
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_training_goes_on_with_shuffled_arrays_as_if_nothing_had_been_checked():
    weights = []
    for is_checked in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("adam", LOSS)
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        if is_checked:
            check_tpu((X, Y), model=model, batch_size=8, replicas=1)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_batch_that_the_devices_do_not_divide_is_found_before_jax_fails_on_it():
    data = batches.ArrayBatches((X, Y), global_batch_size=60)
    keras.distribution.set_distribution(sharding.DataParallel(8))
    try:
        assert found(with_layer(lambda x: x), data) == [("uneven-batch", "error", "train")]
    finally:
        keras.distribution.set_distribution(None)
    loop = training.TrainingLoop(
        testing.tiny_classifier(features=8),
        optimizer="adam",
        loss=LOSS,
        strategy=sharding.data_mesh(8),
    )
    assert found(loop, data) == [("uneven-batch", "slow", "train")]


def test_replica_exact_takes_an_uneven_last_batch_where_keras_does_not():
    uneven = batches.ArrayBatches((X[:40], Y[:40]), global_batch_size=32, remainder="keep")
    settings = {"replicas": 4}
    model = with_layer(lambda x: x)
    assert not check_tpu(uneven, model=model, **settings).clean
    assert check_tpu(uneven, model=training.replica_exact(model), **settings).clean
