"""Programs that readers wrote to fool `replica_exact`: one device's weights, or a sentence."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(31, 4)).astype("float32")
Y = (X @ np.random.default_rng(1).normal(size=(4, 3))).argmax(axis=1)


def losses_of(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def stack(*before, loss=None, metrics=None, units=3, optimizer=None):
    model = keras.Sequential([keras.Input((4,)), *before, layers.Dense(units)])
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, metrics=metrics)
    return model


class OwnStep(keras.Model):
    """One layer, and a step whose loss is scaled."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.build((None, 4))
        self.compile(keras.optimizers.SGD(0.1))

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def scale(self, x):  # noqa: ARG002  # of the examples, perhaps
        return 1.0

    def train_step(self, data):
        x, labels = data
        scale = self.scale(x)
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_mean(losses_of(labels, self(x)))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"scaled": loss}


class LeavesInObject(OwnStep):
    """Keeps what its layer gives in an object, and computes with that."""

    def __init__(self):
        super().__init__()
        self.kept = types.SimpleNamespace()

    def train_step(self, data):
        x, labels = data
        with tf.GradientTape() as tape:
            self.kept.logits = self(x)
            self(-x)
            loss = tf.reduce_mean(losses_of(labels, self.kept.logits + self.dense.bias))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Langevin(keras.optimizers.SGD):
    """Adds noise to each gradient."""

    def update_step(self, gradient, variable, learning_rate):
        noise = 0.1 * tf.random.normal(tf.shape(gradient))
        super().update_step(gradient + noise, variable, learning_rate)


def scaled(scale, make=lambda: None):
    """Return a model that scales its loss by a function of what it holds and of the examples."""

    class Scaled(OwnStep):
        def __init__(self):
            super().__init__()
            self.held = make()

        def scale(self, x):
            return scale(self, x)

    return Scaled


class HiddenOptimizer(OwnStep):
    """Has its optimizer where nobody finds it before the step."""

    def __init__(self):
        super().__init__()
        hidden = keras.optimizers.SGD(0.1)
        self.get_optimizer = lambda: hidden

    def train_step(self, data):
        x, labels = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(labels, self(x)))
        weights = self.trainable_variables
        self.get_optimizer().apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Centered(layers.Layer):
    """Looks at all examples in training."""

    def call(self, x, training=False):
        return x - ops.mean(x, axis=0) if training else x


class AroundCentered(layers.Layer):
    """Looks at all examples, and has a layer that learns from its call that it is trained."""

    def __init__(self):
        super().__init__()
        self.centered, self.dense = Centered(), layers.Dense(3)

    def call(self, x):
        return self.centered(self.dense(x - 0.1 * ops.mean(x, axis=0)))


class Mixed(layers.Layer):
    """Looks at all examples if its caller says so."""

    def call(self, x, mix=False):
        return x + x[::-1] if mix else x * 1.0


class TwoModes(OwnStep):
    mixed = Mixed()

    def call(self, x):
        return self.dense(self.mixed(x)) + self.dense(self.mixed(x, mix=True))


class Phased(layers.Layer):
    """Looks at all examples once a callback has begun the next phase."""

    def build(self, shape):
        self.phase = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        super().build(shape)

    def call(self, x):
        return ops.where(self.phase > 0, x - ops.mean(x, axis=0), x)


class NextPhase(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras' arguments
        self.model.layers[0].phase.assign(epoch)


class InnerStep(OwnStep):
    """Learns to learn: the outer gradient flows through weights of an inner step."""

    def train_step(self, data):
        x, labels = data
        others = [variable.value for variable in self.non_trainable_variables]
        with tf.GradientTape() as outer:
            fast = [tf.convert_to_tensor(variable) for variable in self.trainable_variables]
            with tf.GradientTape() as inner:
                inner.watch(fast)
                logits, _ = self.stateless_call(fast, others, x)
                loss = tf.reduce_mean(losses_of(labels, logits))
            gradients = inner.gradient(loss, fast)
            fast = [w - 0.5 * tf.tanh(10.0 * g) for w, g in zip(fast, gradients, strict=True)]
            logits, _ = self.stateless_call(fast, others, x)
            loss = tf.reduce_mean(losses_of(labels, logits))
        gradients = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"outer": loss}


def drawn_by_numpy():
    return scaled(lambda *_: float(np.random.beta(0.4, 0.4)))()  # as mixup is written


def drawn_eagerly():
    model = drawn_by_numpy()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    return model


class CallingPython(OwnStep):
    """Draws in Python, and takes a gradient through it."""

    def scale(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            drawn = tf.py_function(lambda v: tf.reduce_mean(v) * np.random.rand(), [x], tf.float32)
        return tf.ensure_shape(drawn, []) + tf.reduce_sum(tape.gradient(drawn, x))


class OwnVariables(OwnStep):
    """Counts its steps in a variable of Keras and in one of TensorFlow."""

    aggregation = None

    def build(self, shape):
        super().build(shape)
        self.count = self.add_weight(aggregation=self.aggregation, trainable=False)
        self.steps = tf.Variable(1.0)

    def scale(self, x):  # noqa: ARG002
        self.count.assign(self.count + 1.0)
        return 1.0 + ops.convert_to_tensor(self.count) / self.steps.assign_add(1.0)


@functools.wraps(keras.losses.sparse_categorical_crossentropy)
def hardest(labels, logits):
    losses = losses_of(labels, logits)
    return ops.where(losses >= ops.mean(losses), losses, 0.0)


class Tracking(OwnStep):
    """Counts examples in a metric that a plain object has, and in a variable that adds up."""

    def __init__(self):
        super().__init__()
        self.tracker = types.SimpleNamespace(seen=keras.metrics.Sum())
        self.count = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def scale(self, x):
        self.tracker.seen.update_state(tf.ones(tf.shape(x)[0]))
        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return 1.0 + 0.01 * self.tracker.seen.result()


def counted(model):
    return [float(model.tracker.seen.result()), float(model.count.read_value())]


def shifted(by_all):
    def shift(x):
        return x - ops.mean(x, axis=0) if by_all else x * 1.0

    return shift


def attending_to_the_batch():
    inputs = keras.Input((4,))
    x = layers.Reshape((2, 1, 2))(inputs)
    x = layers.MultiHeadAttention(2, 4, attention_axes=0)(x, x)
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def written_by_exec():
    names = {"keras": keras}
    exec("class Own(keras.Layer):\n def call(self, x): return x - keras.ops.mean(x, 0)", names)
    return names["Own"]()


class OfRankOne(OwnStep):
    """Calls a loss of Keras on predictions that have the axis of the examples alone."""

    def train_step(self, data):
        x, labels = data
        with tf.GradientTape() as tape:
            prediction = tf.reduce_sum(self(x), axis=1)
            loss = keras.losses.MeanSquaredError()(tf.cast(labels, tf.float32), prediction)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"squared": loss}


class SummedVariable(OwnVariables):
    aggregation = "sum"


FEATURES = []


class Tap(layers.Layer):
    """Leaves what it is called on in a list of this module."""

    def call(self, x):
        FEATURES.append(x)
        return x + 0.0


def counting():
    """Scale by what is counted in a variable that was made outside of the scope."""
    with tf.init_scope():
        outside = tf.Variable(1.0)
    return scaled(lambda *_: 1.0 / outside.assign_add(1.0))()


EQUAL = {
    "tensors left in a list": lambda: stack(Tap()),
    "a generator of TensorFlow's": scaled(
        lambda own, _: tf.reduce_mean(own.held.uniform([3])),
        lambda: tf.random.Generator.from_seed(1),
    ),
    "numbers of TensorFlow": scaled(lambda own, x: tf.norm(own(x)) * tf.random.uniform([])),
    "an optimizer that draws": lambda: stack(optimizer=Langevin(0.1)),
    "a variable that adds up": SummedVariable,
    "a variable of nobody's scope": counting,
    "numbers of NumPy": drawn_by_numpy,
    "gradients of a graph": scaled(
        lambda own, x: tf.reduce_mean(tf.gradients(own(x), [own.dense.kernel.value])[0])
    ),
    "a softmax over the examples": lambda: stack(layers.Softmax(axis=-2)),
    "tensors left in an object": LeavesInObject,
    "functions that have one name": lambda: stack(
        layers.Lambda(shifted(False)), layers.Lambda(shifted(True))
    ),
    "activations that have one name": lambda: stack(
        layers.Dense(8, activation=shifted(False)), layers.Dense(8, activation=shifted(True))
    ),
    "attention over the batch": attending_to_the_batch,
    "outputs that are kept orthogonal": lambda: stack(
        layers.Dense(
            8, activity_regularizer=keras.regularizers.OrthogonalRegularizer(0.1, mode="columns")
        )
    ),
    "a layer without a module": lambda: stack(written_by_exec()),
    "a loss of Keras on one axis": OfRankOne,
    "a metric of a plain object": Tracking,
    "layers of two types": lambda: stack(layers.Dense(8, dtype="float64")),
    "what replicas add up": scaled(  # as loops of TensorFlow's guides do
        lambda _, x: tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_mean(x**2))
    ),
    "a metric that compares examples": lambda: stack(
        loss="mse", metrics=[keras.losses.dice], units=1
    ),
    "an optimizer that is hidden": HiddenOptimizer,
    "a loss that is called as Keras'": lambda: stack(loss=hardest),
    "numbers that a function of Python draws": CallingPython,
    "variables of the model": OwnVariables,
    "a verdict of evaluate": lambda: stack(Centered()),
    "a mode of the call around": lambda: stack(AroundCentered()),
    "one layer in two modes": TwoModes,
    "a phase of a callback": lambda: stack(Phased()),
    "an inner step": InnerStep,
    "a loss along the batch": lambda: stack(loss=keras.losses.CosineSimilarity(axis=0)),
    "a metric along the batch": lambda: stack(
        loss="mse", metrics=[keras.metrics.CosineSimilarity(axis=0)], units=1
    ),
    "numbers of NumPy, eagerly": drawn_eagerly,
}


QUICK = ("a verdict of evaluate", "one layer in two modes", "an inner step")


def fitted(model, name):
    by_columns = "along the batch" in name or "compares" in name
    labels = X[:, :1] if by_columns else Y
    data = tf.data.Dataset.from_tensor_slices((X, labels)).batch(7)
    callbacks = [NextPhase()] if "phase" in name else []
    np.random.seed(0)
    if "evaluate" in name:
        model.evaluate(data, verbose=0)
    history = model.fit(data, epochs=2, callbacks=callbacks, verbose=0).history
    if isinstance(model, Tracking):
        history["counted"] = counted(model)
    weights = [weight.ravel() for weight in model.get_weights()]
    return np.concatenate(weights), history


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in EQUAL]
)
def test_it_trains_as_on_one_device(name):
    keras.utils.set_random_seed(0)
    one, history = fitted(EQUAL[name](), name)
    keras.utils.set_random_seed(0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = replica_exact(EQUAL[name]())
    many, ours = fitted(model, name)
    np.testing.assert_allclose(many, one, atol=2e-6)
    for log, values in history.items():
        np.testing.assert_allclose(ours[log], values, rtol=1e-5, atol=1e-6)


def test_weights_that_have_more_axes_than_the_losses_count_as_keras_counts_them():
    targets = X[:, :1, None]
    weights = np.random.default_rng(2).uniform(size=(len(X), 5)).astype("float32")
    trained = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), layers.Dense(1), layers.Reshape((1, 1))])
            model = replica_exact(model) if strategy.num_replicas_in_sync > 1 else model
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, targets, sample_weight=weights, batch_size=7, shuffle=False, verbose=0)
        trained.append(model.get_weights()[0])
    np.testing.assert_allclose(*trained, atol=1e-6)


def test_a_step_predicts_ragged_tensors():
    class Ragged(OwnStep):
        def predict_step(self, data):
            return tf.RaggedTensor.from_tensor(self(data))

    one = Ragged()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = replica_exact(Ragged())
    model.set_weights(one.get_weights())
    found, known = (of.predict(X, batch_size=7, verbose=0) for of in (model, one))
    np.testing.assert_allclose(found.to_tensor(), known.to_tensor(), rtol=1e-5)
