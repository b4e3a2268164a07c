"""`remat` against the same steps without; test_environments.py runs it on JAX."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from kdpkit import testing
from kdpkit.training import remat, replica_exact
from tests.training.exactness import ON_JAX, assert_same_weights, cross_entropy, scopes


def seeded(build):
    @functools.wraps(build)
    def built(*args, **kwargs):
        keras.utils.set_random_seed(7)
        return build(*args, **kwargs)

    return built


class Residual(layers.Layer):
    """A block with a state of each kind, and no `training` argument to pass on."""

    def __init__(self, *parts, penalty=0.0, **settings):
        super().__init__(**settings)
        self.supports_masking = True
        self.parts = parts
        self.penalty = penalty
        self.scale = None
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.scale = self.add_weight(name="scale", shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.calls.assign_add(1.0)
        y = x
        for part in self.parts:
            y = part(y)
        self.add_loss(self.penalty * keras.ops.mean(keras.ops.square(y)))
        return x + self.scale * y


@seeded
def residual():
    inputs = keras.Input((4,))
    x = layers.Dense(6)(inputs)
    for _ in range(2):
        x = Residual(
            layers.Dense(6, "gelu", activity_regularizer=keras.regularizers.L2(0.01)),
            layers.Dropout(0.4),
            layers.BatchNormalization(momentum=0.8),
            penalty=0.1,
        )(x)
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(x))


@seeded
def nested():
    """A model whose blocks are in models, one of them a model of two inputs without blocks."""
    inputs = keras.Input((4,))
    hidden = keras.Input((6,)), keras.Input((6,))
    joined = layers.Dropout(0.3)(layers.Dense(6, "tanh")(layers.Concatenate()(hidden)))
    pair = keras.Model(hidden, [joined, hidden[0]])
    shared = keras.Sequential([layers.Dense(6, "gelu"), layers.Dropout(0.2)])
    inner = keras.Sequential([layers.Dense(6), Residual(layers.Dense(6)), shared])
    x = inner(inputs)
    one, two = pair([x, shared(x)])
    return keras.Model(inputs, layers.Dense(3)(one + two))


def trained(devices, build, *, is_remat, **settings):
    building, training_scope = scopes(None if devices == 1 else devices)
    with building:
        model = seeded(build)()
        metrics = ["accuracy"]
        optimizer = keras.optimizers.SGD(0.02)
        model.compile(optimizer, cross_entropy(), metrics=metrics, **settings)
        if is_remat:
            assert remat(remat(model)) is model
    x, y = testing.toy_classification(10)
    with training_scope:
        if devices > 1:
            replica_exact(model)
        data = {"x": x, "y": y, "validation_data": (x, y)}
        history = model.fit(**data, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return model, history.history


def assert_same(ours, theirs, tolerance=1e-6):
    assert ours[1].keys() == theirs[1].keys()
    for name, values in ours[1].items():
        assert values == pytest.approx(theirs[1][name], rel=1e-5, abs=tolerance), name
    assert_same_weights(ours[0], theirs[0], tolerance)
    for one, other in zip(ours[0].variables, theirs[0].variables, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)  # seeds, too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "devices", "settings"),
    [
        (residual, 2, {"steps_per_execution": 2}),
        (residual, 1, {"jit_compile": True}),
        (nested, 3, {}),
    ],
)
def test_fit_trains_what_it_trains_with_all_activations(build, devices, settings, capfd):
    ours = trained(devices, build, is_remat=True, **settings)
    assert "kdpkit: " not in capfd.readouterr().err
    assert_same(ours, trained(1, build, is_remat=False, **settings))


@pytest.mark.slow
def test_a_backbone_of_keras_hub_in_half_precision_trains_alike():
    import keras_hub

    ids = np.random.default_rng(0).integers(0, 11, (6, 4)).astype("int32")
    x = {"token_ids": ids, "padding_mask": ids > 1}
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    sizes |= {"vocabulary_size": 11, "max_sequence_length": 4, "dropout": 0.3}
    sizes |= {"dtype": "mixed_bfloat16"}

    @seeded
    def weights_and_losses(is_remat):
        backbone = keras_hub.models.GPT2Backbone(**sizes)
        model = keras.Model(backbone.input, layers.Dense(11, dtype="float32")(backbone.output))
        model.compile(keras.optimizers.SGD(0.2), cross_entropy())
        model = remat(model) if is_remat else model
        history = model.fit(x, ids, batch_size=3, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), history.history["loss"]]

    for ours, theirs in zip(weights_and_losses(True), weights_and_losses(False), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)  # XLA rounds to 16 bits where it likes


def test_an_eager_step_of_ones_own_computes_the_same_gradients():
    def gradients(is_remat):
        model = seeded(residual)()
        model = remat(model) if is_remat else model
        x, y = testing.toy_classification(10)
        variables = model.trainable_variables
        if ON_JAX:
            import jax

            others = [variable.value for variable in model.non_trainable_variables]

            def loss(weights):
                outputs, _ = model.stateless_call(weights, others, x, training=True)
                return cross_entropy()(y, outputs)

            return jax.grad(loss)([variable.value for variable in variables])
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = cross_entropy()(y, model(x, training=True)) + sum(model.losses)
        return tape.gradient(loss, [variable.value for variable in variables])

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_the_model_is_saved_as_it_is(tmp_path):
    block = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model = remat(keras.Sequential([keras.Input((4,)), block]))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "call" not in vars(loaded.layers[-1])
    x = np.ones((3, 4))
    np.testing.assert_array_equal(model.predict(x), loaded.predict(x))


def test_a_model_without_blocks_gets_one_sentence():
    with pytest.raises(ValueError, match="`remat`.*model='sequential.*keras.Sequential"):
        remat(testing.tiny_classifier())


class Borrowing(layers.Layer):
    """A block that uses a weight that is not its own, and random numbers without a seed."""

    def __init__(self, lender, *, is_noisy, **settings):
        super().__init__(**settings)
        self.dense = layers.Dense(6)
        vars(self)["lender"] = lender  # so that Keras does not track it
        self.is_noisy = is_noisy

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        noise = keras.random.uniform(keras.ops.shape(x)) if self.is_noisy else 1.0
        return self.dense(x) * noise + keras.ops.matmul(x, self.lender.kernel)


def test_weights_of_other_layers_and_numbers_without_a_seed_are_found():
    @seeded
    def borrowing():
        inputs = keras.Input((4,))
        lender = layers.Dense(6)
        x = layers.Dense(6)(inputs)
        blocks = [Borrowing(lender, is_noisy=not ON_JAX) for _ in range(2)]
        return keras.Model(inputs, layers.Dense(3)(lender(blocks[1](blocks[0](lender(x))))))

    assert_same(trained(1, borrowing, is_remat=False), trained(2, borrowing, is_remat=True))
