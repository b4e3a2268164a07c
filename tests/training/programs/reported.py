"""Small programs in the manner of those that were once wrong, or stopped, on replicas."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

_ROWS = 21


def network(outputs=1, inputs=6):
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(9, activation="relu"), layers.Dense(outputs)]
    )


def products():
    x = np.random.default_rng(4).normal(size=(_ROWS, 6)).astype("float32")
    return {"x": x, "y": x[:, :1] * x[:, 1:2], "batch_size": 8}


class NoisyLabels(keras.losses.Loss):
    """Returns one number for a batch, and draws for its examples."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, y_true, y_pred):
        noisy = y_true + 0.5 * keras.random.normal(ops.shape(y_true), seed=self.seed)
        return ops.mean(ops.square(noisy - y_pred))


class MovingNormalizer(keras.losses.Loss):
    """Keeps the number of positives in a variable, and divides by it."""

    def __init__(self, variable):
        super().__init__()
        self.positives = variable

    def call(self, y_true, y_pred):
        self.positives.assign(0.9 * self.positives + 0.1 * ops.sum(ops.cast(y_true > 0, "float32")))
        return ops.sum(ops.square(y_true - y_pred)) / self.positives


def compiled(make_loss, metrics=lambda: None):
    def build():
        model = network()
        model.compile(keras.optimizers.SGD(0.05), make_loss(), metrics=metrics())
        return model

    return build


def critic_in_loss():
    """A loss that trains against a network with batch statistics."""
    critic = keras.Sequential(
        [keras.Input((1,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)]
    )

    def loss(y_true, y_pred):
        judged = ops.mean(ops.softplus(-critic(y_pred, training=True)))
        return judged + ops.mean(ops.square(y_true - y_pred))

    return loss


class BySize(keras.Model):
    """Treats a batch by how many examples it has."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = network(), kind

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        is_full = ops.shape(x)[0] >= 8
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.net(x, training=True) - y))
            if self.kind == "ones":
                loss *= tf.where(ops.sum(ops.ones_like(x[:, 0])) < 6.0, 0.1, 1.0)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.kind == "gradient":
            gradients = [g * ops.cast(is_full, "float32") for g in gradients]
        if self.kind == "rate":
            self.optimizer.learning_rate.assign(tf.where(is_full, 0.1, 0.01))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def by_size(kind):
    def build():
        model = BySize(kind)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


class SemiSupervised(keras.Model):
    """Is given unlabeled and labeled examples, of other numbers."""

    def __init__(self):
        super().__init__()
        self.net = network(3)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        unlabeled, (x, y) = data
        with tf.GradientTape() as tape:
            guesses = ops.stop_gradient(ops.softmax(self.net(unlabeled)))
            is_sure = ops.cast(ops.max(guesses, -1) > 0.4, "float32")
            of_guesses = keras.losses.sparse_categorical_crossentropy(
                ops.argmax(guesses, -1), self.net(unlabeled + 0.1), from_logits=True
            )
            of_labels = keras.losses.sparse_categorical_crossentropy(
                y, self.net(x), from_logits=True
            )
            loss = ops.mean(of_labels) + ops.mean(of_guesses * is_sure)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def semi_supervised():
    model = SemiSupervised()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def unlabeled_and_labeled():
    random = np.random.default_rng(4)
    x, y = random.normal(size=(13, 6)).astype("float32"), random.integers(0, 3, 13)
    unlabeled = random.normal(size=(31, 6)).astype("float32")
    slices = tf.data.Dataset.from_tensor_slices
    return {"x": tf.data.Dataset.zip((slices(unlabeled).batch(14), slices((x, y)).batch(5)))}


class Accumulating(keras.Model):
    """Adds up gradients in variables of its own, and applies them in every second step."""

    def __init__(self, in_condition):
        super().__init__()
        self.net, self.in_condition = network(), in_condition
        self.counter = tf.Variable(0, trainable=False)
        self.store = [
            tf.Variable(tf.zeros_like(v), trainable=False) for v in self.net.trainable_variables
        ]

    def call(self, x, training=None):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        self.counter.assign_add(1)
        weights = self.net.trainable_variables
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predictions)
        for stored, gradient in zip(self.store, tape.gradient(loss, weights), strict=True):
            stored.assign_add(gradient / 2)
        is_due = tf.equal(self.counter % 2, 0)
        if self.in_condition:
            tf.cond(is_due, self.apply_stored, lambda: None)
        else:
            due = tf.cast(is_due, tf.float32)
            self.optimizer.apply([stored * due for stored in self.store], weights)
            for stored in self.store:
                stored.assign(stored * (1 - due))
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, predictions]))
        return {metric.name: metric.result() for metric in self.metrics}

    def apply_stored(self):
        self.optimizer.apply([*self.store], self.net.trainable_variables)
        for stored in self.store:
            stored.assign(tf.zeros_like(stored))


def accumulating(in_condition, metrics=None):
    def build():
        model = Accumulating(in_condition)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=metrics)
        if in_condition:
            model.optimizer.build(model.net.trainable_variables)
        return model

    return build


class Unfreeze(keras.callbacks.Callback):
    """Compiles the model again, with another optimizer and a metric."""

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        if epoch == 1:
            self.model.layers[0].trainable = True
            self.model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
            self.model.make_train_function()


def frozen():
    model = network()
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Block(layers.Layer):
    """Builds its layers when it is called."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=1)
        self.dense = layers.Dense(4)

    def call(self, x, training=False):
        return self.dense(self.attention(x, x, training=training))


class Unbuilt(keras.Model):
    """Has layers that its step is the first to call."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.block(x, training=True) - y) ** 2)
        weights = self.block.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def unbuilt():
    model = Unbuilt()
    model.compile("sgd")
    return model


def sequences():
    x = np.random.default_rng(0).normal(size=(_ROWS, 5, 4)).astype("float32")
    return {"x": x, "y": np.flip(x, 1).copy(), "batch_size": 8}


class Edges(layers.Layer):
    """Convolves with a constant that it makes when it is made."""

    def __init__(self):
        super().__init__()
        self.kernel = tf.constant(np.ones((3, 3, 1, 2), "float32") / 9)

    def call(self, x):
        return tf.nn.conv2d(x, self.kernel, strides=1, padding="SAME")


def edges():
    model = keras.Sequential([keras.Input((8, 8, 1)), Edges(), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def images():
    x = np.random.default_rng(0).normal(size=(_ROWS, 8, 8, 1)).astype("float32")
    return {"x": x, "y": x[:, 0, 0], "batch_size": 8}


class Smallest(keras.metrics.Metric):
    """Keeps the smallest prediction: no sum."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_variable(shape=(), initializer="ones", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):  # noqa: ARG002  # Keras'
        self.value.assign(ops.minimum(self.value, ops.min(y_pred)))

    def result(self):
        return self.value.value


class Saliency(keras.Model):
    """Takes the gradient of what a layer gives by what a layer before it gave."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(9, activation="tanh"), layers.Dense(1)
        self.body.build((None, 6))
        self.head.build((None, 9))

    def call(self, x):
        return self.head(self.body(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            features = self.body(x)
            with tf.GradientTape() as inner:
                inner.watch(features)
                scores = self.head(features)
            by_features = inner.gradient(scores, features)
            used = features * ops.max(ops.abs(by_features), axis=0)
            loss = ops.mean(ops.square(scores + self.head(used) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def saliency():
    model = Saliency()
    model.compile(keras.optimizers.SGD(0.1))
    return model


_HERE = {"backends": ("tensorflow",)}
PROGRAMS = [
    Program("a loss of one number that draws", compiled(NoisyLabels), products, **_HERE),
    *(
        Program(
            f"a loss with a {kind}",
            compiled(lambda variable=variable: MovingNormalizer(variable())),
            products,
            **_HERE,
        )
        for kind, variable in {
            "variable of Keras": lambda: keras.Variable(10.0, trainable=False),
            "variable of TensorFlow": lambda: tf.Variable(10.0, trainable=False),
        }.items()
    ),
    Program(
        "a loss with a network of batch statistics", compiled(critic_in_loss), products, **_HERE
    ),
    *(
        Program(f"{kind} by the number of examples", by_size(kind), products, **_HERE)
        for kind in ("gradient", "rate", "ones")
    ),
    Program("labeled and unlabeled examples", semi_supervised, unlabeled_and_labeled, **_HERE),
    Program("gradients added up in variables", accumulating(False, ["mae"]), products, **_HERE),
    Program("gradients applied in a condition", accumulating(True), products, **_HERE),
    Program(
        "compiled again in a callback",
        frozen,
        lambda: products() | {"callbacks": [Unfreeze()]},
        **_HERE,
    ),
    Program("layers that a step builds", unbuilt, sequences, **_HERE),
    Program("a constant that a layer has made", edges, images, **_HERE),
    Program(
        "a metric that is no sum",
        compiled(lambda: "mse", metrics=lambda: [Smallest()]),
        products,
        **_HERE,
    ),
    Program("a gradient between layers", saliency, products, **_HERE),
]
