"""Steps that do whatever TensorFlow allows: loops, conditions, gradients of their own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import CustomStep, compile_model, on_tensorflow, program

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(21, 6)).astype("float32")
Y = RANDOM.normal(size=(21, 3)).astype("float32")


def several_numbers():
    """Return vectors and three numbers for each, with some to validate with."""
    return {"x": X, "y": Y, "batch_size": 8, "validation_data": (X[:5], Y[:5])}


def of_a_static_size():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    return {"x": dataset, "validation_data": (X[:5], Y[:5])}


class TwoLayers(CustomStep):
    """A regression with a body and a head, which counts its traces."""

    def __init__(self):
        super().__init__(layers.Dense(3))
        self.body, self.traces = layers.Dense(8, "tanh"), 0
        self.prepare()
        self.build((None, 6))

    def prepare(self):
        """Make what the step uses besides."""

    def build(self, shape):
        self.body.build(shape)
        self.net.build((None, 8))
        self.built = True

    def call(self, x, training=None):  # noqa: ARG002  # Keras' arguments
        return self.net(self.body(x))

    def step_loss(self, x, y):
        return tf.reduce_mean((self(x, training=True) - y) ** 2)

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def steps(name, run="slow"):
    """Add a class of steps to the programs, whose optimizer is built before it trains."""

    def add(kind):
        def build():
            model = compile_model(kind(), lambda: keras.optimizers.SGD(0.05), "mse")
            model.optimizer.build(model.trainable_variables)
            return model

        on_tensorflow(name, build, several_numbers, run=run)
        return kind

    return add


@steps("a step that counts its traces")
class Counting(TwoLayers):
    """Is traced as often as on one device, if its variables are there before."""

    def step_loss(self, x, y):
        return float(self.traces) * super().step_loss(x, y)


@steps("a step that draws by TensorFlow and by NumPy", run="quick")
class Drawing(TwoLayers):
    def prepare(self):
        self.generator = tf.random.Generator.from_seed(3)

    def step_loss(self, x, y):
        noise = self.generator.normal(tf.shape(y)) + tf.random.normal(tf.shape(y))
        return super().step_loss(x, y + 0.1 * noise) * float(np.random.rand())


@steps("a penalty of gradients, through batch statistics")
class Penalized(TwoLayers):
    def prepare(self):
        self.norm = layers.BatchNormalization()
        self.norm.build((None, 8))

    def call(self, x, training=None):
        return self.net(self.norm(self.body(x), training=training))

    def step_loss(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            predicted = self(x, training=True)
        slope = tape.gradient(predicted, x)
        return tf.reduce_mean((predicted - y) ** 2) + 0.2 * tf.reduce_mean(slope**2)


@steps("a layer in a loop and in a condition", run="quick")
class Looping(TwoLayers):
    def step_loss(self, x, y):
        def again(index, h):
            return index + 1, self.body(h[:, :6]) + 0.1

        shapes = tf.TensorShape([]), tf.TensorShape([None, 8])
        padded = tf.pad(x, [[0, 0], [0, 2]])
        _, h = tf.while_loop(lambda index, _: index < 3, again, (0, padded), shapes)
        is_positive = tf.reduce_sum(h) > 0
        h = tf.cond(is_positive, lambda: self.net(h), lambda: self.net(2.0 * h))
        return tf.reduce_mean((h - y) ** 2)


@steps("gradients of a graph, of what is used in arithmetic")
class Walking(TwoLayers):
    def step_loss(self, x, y):
        h = self.body(x)
        predicted = self.net(tf.nn.softplus(h) * h)
        (slope,) = tf.gradients(tf.reduce_sum(predicted), [h])
        return tf.reduce_mean((predicted - y) ** 2) + tf.reduce_mean(slope**2)


@steps("gradients of its own, and recomputed ones")
class Recomputing(TwoLayers):
    def step_loss(self, x, y):
        @tf.custom_gradient
        def halved(x):
            def gradient(upstream, variables=None):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    again = self.body(x)
                sources = [x, *variables]
                dx, *dvariables = tape.gradient(again, sources, output_gradients=upstream)
                return 0.5 * dx, [0.5 * gradient for gradient in dvariables]

            return self.body(x), gradient

        h = halved(x) + tf.recompute_grad(lambda x: self.body(x))(x)
        return tf.reduce_mean((self.net(h) - y) ** 2)


class Decorrelate(keras.regularizers.Regularizer):
    """Compares the examples of what a layer returns."""

    def __call__(self, a):
        return 5.0 * ops.square(ops.mean(a)) + ops.var(a)


@steps("a layer called twice, whose regularizer compares examples")
class Regularized(TwoLayers):
    def prepare(self):
        self.net = layers.Dense(3, activity_regularizer=Decorrelate())

    def step_loss(self, x, y):
        loss = super().step_loss(x, y) + sum(self.net.losses)
        again = self.net(tf.stack([self.body(x), 2.0 * self.body(x)], 1))
        return loss + sum(self.net.losses) + ops.mean(again**2)


class Pair(layers.Layer):
    """Computes two tensors alike."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 8))

    def call(self, a, b):
        return self.dense(a), self.dense(b)


@steps("some of the examples beside all of them", run="quick")
class OtherLengths(TwoLayers):
    def prepare(self):
        self.pair = Pair()

    def step_loss(self, x, y):
        h = self.body(x)
        some, of_all = self.pair(tf.boolean_mask(h, h[:, 0] > 0), h)
        return tf.reduce_mean(some**2) + tf.reduce_mean((of_all + self.net(h) - y) ** 2)


@steps("the number of examples from an output")
class SizeOfOutputs(TwoLayers):
    """Contrasts the examples, as contrastive losses do."""

    def step_loss(self, x, y):
        h = self.body(x)
        size = h.shape[0] or tf.shape(h)[0]
        scores = tf.matmul(h, h, transpose_b=True)
        labels = tf.one_hot(tf.range(size), size)
        contrast = tf.nn.softmax_cross_entropy_with_logits(labels, scores)
        return super().step_loss(x, y) + tf.reduce_mean(contrast)


program(
    "the number of examples from an output of a static size",
    of_a_static_size,
    run="slow",
    loss="mse",
)(SizeOfOutputs)


@program(
    "parts of the model, and a layer that it does not call", several_numbers, run="slow", loss="mse"
)
class PartsOfTheModel(TwoLayers):
    """Trains a layer that `call` does not use, and not all that it uses."""

    def prepare(self):
        self.decoder = keras.Sequential([layers.Dense(6)])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self(data[0])) - data[0]) ** 2)
        self.update(tape, loss, self.decoder.trainable_variables + self.body.trainable_variables)
        return {"loss": loss}


class Autoencoder(keras.Model):
    """Adds a loss in `call`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(3), layers.Dense(3)

    def build(self, shape):
        self.encoder.build(shape)
        self.decoder.build((None, 3))
        self.built = True

    def call(self, x):
        z = self.encoder(x)
        self.add_loss(0.1 * ops.mean(ops.square(z)) + ops.square(ops.mean(z)))
        return self.decoder(z)


def autoencoder():
    model = Autoencoder()
    model.build((None, 6))
    return compile_model(model, loss="mse")


on_tensorflow("a model that adds a loss in `call`", autoencoder, several_numbers, run="slow")
