"""Programs whose parts are a `tf.function` of their own, or variables of TensorFlow."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.training.programs import Program


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(17, 4)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, 17), "batch_size": 7}


def _mean_loss(y, logits):
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return tf.reduce_mean(losses)


class OfFunctions(keras.Model):
    """A classifier whose step, and what it calls, are functions of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3, seed=1),
                layers.Dense(3),
            ]
        )

    @tf.function
    def call(self, x, training=False):
        return self.net(x, training=training)

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = _mean_loss(y, self(x, training=True))
            if loss > 1.0:
                loss = loss * 0.5
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class OfVariables(keras.Model):
    """Trains variables of TensorFlow, beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(3)
        self.last.build((None, 3))
        random = np.random.default_rng(1)
        self.kernel = tf.Variable(random.normal(size=(4, 3)).astype("float32"), name="kernel")

    def call(self, x):
        return self.last(tf.nn.relu(tf.cast(x, tf.float32) @ self.kernel))

    def train_step(self, data):
        x, y = data
        variables = [self.kernel, *self.last.trainable_variables]
        with tf.GradientTape() as tape:
            loss = _mean_loss(y, self(x))
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def _compiled(model):
    def build():
        built = model()
        built.compile(keras.optimizers.SGD(0.1))
        return built

    return build


PROGRAMS = [
    Program("a step and a call of functions", _compiled(OfFunctions), _data, ("tensorflow",)),
    Program("variables of TensorFlow", _compiled(OfVariables), _data, ("tensorflow",)),
]
