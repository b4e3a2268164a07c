"""Steps on the global batch: their gradients are one device's, whatever the step does with them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kdpkit.training import gather_examples, replica_exact
from kdpkit.training.tensorflow import _whose_code
from tests.training.programs import Program, outcomes, planted

pytestmark = pytest.mark.tensorflow
REPLICAS = [3, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 4, 8))]


class Mixing(layers.Layer):
    """Has parameters, and looks at all examples."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x - ops.mean(x, axis=0) + ops.flip(x, axis=0))


class Custom(keras.Model):
    """A text classifier whose step computes its loss and changes its gradients as it is told."""

    def __init__(self, loss, change=lambda gradients: gradients, middle=None, optimizer=None):
        super().__init__()
        self.embedding = layers.Embedding(11, 4, mask_zero=True)
        self.pool = layers.GlobalAveragePooling1D()
        self.middle = middle or layers.BatchNormalization()
        self.drop = layers.Dropout(0.3)
        self.logits = layers.Dense(3, kernel_regularizer="l2")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.loss_of, self.change = loss, change
        self.mean = keras.metrics.Mean("mean")
        self.total = keras.metrics.Sum("total")
        self.compile(optimizer or keras.optimizers.SGD(0.5, momentum=0.9))

    def features(self, tokens, training=True):
        x = self.pool(self.embedding(tokens))
        return self.drop(self.middle(x), training=training)

    def call(self, tokens, training=False):
        return self.logits(self.features(tokens, training))

    def train_step(self, data):
        tokens, labels = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, tokens, labels) + sum(self.losses)
        gradients = self.change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean.update_state(loss)
        self.total.update_state(ops.cast(labels, "float32"))
        return {"mean": self.mean.result(), "total": self.total.result()}


def cross_entropies(model, tokens, labels):
    return keras.losses.sparse_categorical_crossentropy(
        labels, model(tokens, training=True), from_logits=True
    )


def summed(model, tokens, labels):
    return ops.sum(cross_entropies(model, tokens, labels) * model.scale)


def contrasted(model, tokens, labels):
    features = model.features(tokens)
    similar = ops.matmul(features, ops.transpose(features)) * ops.exp(model.scale)
    positive = ops.cast(labels[:, None] == labels[None], "float32")
    losses = ops.sum(positive * ops.log_softmax(similar), axis=-1)
    return ops.mean(cross_entropies(model, tokens, labels)) - 0.1 * ops.mean(losses)


def permuted(model, tokens, labels):
    order = keras.random.shuffle(ops.arange(ops.shape(tokens)[0]), seed=model.drop.seed_generator)
    return ops.mean(cross_entropies(model, tokens, ops.take(labels, order)))


def twice_as_many(model, tokens, labels):  # noqa: ARG001  # as its like
    both = ops.concatenate([tokens, tokens[:, ::-1]])
    one, other = ops.split(model.features(both), 2)
    return ops.mean(ops.square(one - other) * model.scale) + ops.mean(model(both)[:, 0]) ** 2


def penalized(model, tokens, labels):
    """Adds the gradients' norm by a divided layer's input: a second derivative."""
    features = model.features(tokens)
    with tf.GradientTape() as inner:
        inner.watch(features)
        logits = ops.sum(ops.square(model.logits(features)))
    norms = ops.norm(inner.gradient(logits, features), axis=-1)
    return ops.mean(ops.square(norms - 1.0)) / ops.max(norms) + ops.mean(
        cross_entropies(model, tokens, labels)
    )


def penalized_by_weights(model, tokens, labels):
    """Adds the norm of a gradient by weights, which is added up over the replicas."""
    with tf.GradientTape() as inner:
        loss = ops.max(cross_entropies(model, tokens, labels)) + summed(model, tokens, labels)
    gradient = inner.gradient(loss, model.logits.kernel)
    return 0.1 * loss + 0.01 * ops.sum(ops.square(gradient))


def clipped(gradients):
    dense = [ops.convert_to_tensor(gradient) for gradient in gradients]
    return tf.clip_by_global_norm(dense, 0.1)[0]


def clipped_with_slices(gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


STEPS = {
    "a sum": lambda: Custom(summed),
    "all with all": lambda: Custom(contrasted),
    "a permutation": lambda: Custom(permuted),
    "other numbers of examples": lambda: Custom(twice_as_many),
    "a gradient penalty": lambda: Custom(penalized),
    "a penalty of the gradient of weights": lambda: Custom(penalized_by_weights),
    "clipped": lambda: Custom(summed, clipped),
    "clipped, with an embedding's slices": lambda: Custom(summed, clipped_with_slices),
    "a layer that looks at all examples": lambda: Custom(summed, middle=Mixing()),
    "a loss scale": lambda: Custom(
        lambda model, *data: model.optimizer.scale_loss(summed(model, *data)),
        optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    ),
    "gathered, which they are already": lambda: Custom(
        lambda model, *data: gather_examples(summed(model, *data)[None])[0]
    ),
}

TELLING = (
    "clipped, with an embedding's slices",
    "a layer that looks at all examples",
)


def texts():
    random = np.random.default_rng(1)
    tokens = random.integers(0, 11, (13, 5))
    return {"x": tokens, "y": random.integers(0, 3, 13), "batch_size": 7}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in TELLING else pytest.mark.exhaustive)
        for name in STEPS
    ],
)
def test_a_step_trains_as_on_one_device(name, replicas):
    found = outcomes.outcome(Program(name, STEPS[name], texts), replicas)
    assert found.verdict == "equal", found


def test_only_layers_of_keras_are_divided_where_a_layer_looks_at_all_examples():
    assert not _whose_code.is_of_a_library(Mixing())
    assert _whose_code.is_of_a_library(layers.Dense(3))
    assert not _whose_code.is_of_a_library(keras.Sequential([layers.Dense(3), Mixing()]))
    assert _whose_code.is_of_a_library(keras.Sequential([layers.Dense(3)]))


def test_slices_of_each_example_are_of_a_library_and_others_are_not():
    x = keras.Input((4, 3))
    assert _whose_code.is_of_a_library(keras.Model(x, layers.Dense(3)(x[:, 0])))
    assert not _whose_code.is_of_a_library(keras.Model(x, layers.Dense(3)(x[1:, 0])))


@pytest.mark.slow
def test_a_model_that_is_loaded_again_trains_the_same(tmp_path):
    build = planted.BUILDERS["add_loss of a sum"]
    data = {**planted.examples(), "shuffle": False, "verbose": 0}

    def trained(again):
        keras.utils.set_random_seed(0)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = replica_exact(build())
        model.fit(**data)
        if again:
            model.save(tmp_path / "model.keras")
            with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
                objects = {"SummedActivity": planted.SummedActivity}
                loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects=objects)
            model = replica_exact(loaded)
        model.fit(**data)
        return model.get_weights()

    for one, other in zip(trained(False), trained(True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def attending(axes, *, undivided=False):
    """Build a model of Keras alone; with 2 axes its attention is between examples."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = layers.Reshape((6,) if axes == 2 else (2, 3))(layers.Dense(6)(inputs))
    attention = layers.Attention()
    attended = attention([x, x])
    model = keras.Model(inputs, layers.Dense(1)(layers.Reshape((6,))(attended)))
    model = replica_exact(model, undivided=[attention] if undivided else [])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def fitted(model):
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize(("axes", "undivided"), [(3, False), (2, True)])
def test_attention_trains_as_on_one_device(axes, undivided):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = attending(axes, undivided=undivided)
    np.testing.assert_allclose(fitted(model), fitted(attending(axes)), atol=1e-6)


def test_attention_of_too_few_axes_is_one_sentence():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = attending(2)
    with pytest.raises(ValueError, match=r"too few axes.*layer='attention.*undivided=\[layer\]"):
        fitted(model)
