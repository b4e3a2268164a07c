"""Models whose layers keep tensors in attributes, which are read behind batch statistics."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(17, 5, 4)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, 17), "batch_size": 7}


class Attention(layers.Layer):
    """Keeps its scores, their entropy, and what it has seen, for whoever asks."""

    def __init__(self):
        super().__init__()
        self.query = layers.Dense(1)
        self.norm = layers.BatchNormalization()
        self.found, self.history = {}, []

    def build(self, shape):
        self.query.build(shape)
        self.norm.build((shape[0], shape[2]))

    def call(self, x, training=False):
        self.scores = ops.softmax(self.query(x)[..., 0])
        self.found["entropy"] = -ops.mean(ops.sum(self.scores * ops.log(self.scores), axis=-1))
        self.history.clear()
        self.history.append(ops.mean(ops.square(self.scores)))
        return self.norm(ops.sum(x * self.scores[..., None], axis=1), training=training)


class Attentive(keras.Model):
    """A classifier with a `train_step` that reads what its attention has kept."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = layers.Dense(3)

    def build(self, shape):
        self.attention.build(shape)
        self.head.build((shape[0], shape[2]))

    def call(self, x, training=False):
        logits = self.head(self.attention(x, training=training))
        self.last_loss = 0.01 * ops.mean(ops.square(logits))
        return logits

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            of_classes = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = ops.mean(of_classes) + self.last_loss
            loss += 0.1 * self.attention.found["entropy"] + sum(self.attention.history)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "largest": ops.mean(ops.max(self.attention.scores, axis=-1))}


def _attentive(eager=False):
    def make():
        model = Attentive()
        model.build((None, 5, 4))
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
        return model

    return make


PROGRAMS = [
    Program("tensors that layers keep", _attentive(), _data, backends=("tensorflow",)),
    Program("tensors kept by eager layers", _attentive(eager=True), _data, ("tensorflow",)),
]
