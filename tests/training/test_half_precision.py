"""Programs in half precision: two replicas train one device's weights, silently."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.training.exactness import BFLOAT16, FLOAT16
from tests.training.programs import Program, outcomes

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]
TOLERANCES = {"mixed_float16": FLOAT16, "mixed_bfloat16": BFLOAT16}

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(17, 4)).astype("float32")
Y = (X @ RANDOM.normal(size=(4, 3))).argmax(axis=1)
TOKENS = RANDOM.integers(1, 9, (17, 6)) * (np.arange(6) < RANDOM.integers(1, 7, (17, 1)))


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, loss="mse"):
    model.compile(keras.optimizers.SGD(0.1), cross_entropy() if loss is None else loss)
    return model


def net(*middle, units=3):
    head = layers.Dense(units, dtype="float32")
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), *middle, head])


def stock():
    return compiled(net(layers.BatchNormalization(), layers.Dropout(0.3)), loss=None)


def masked():
    embedding = layers.Embedding(9, 4, mask_zero=True)
    recurrent = layers.LSTM(5, return_sequences=True)
    head = layers.Dense(9, dtype="float32")
    model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, recurrent, head])
    return compiled(model, loss=None)


class Gated(layers.Layer):
    """Computes each example by itself."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")

    def call(self, x):
        return x * ops.sigmoid(ops.matmul(x, self.kernel))


class Centered(layers.Layer):
    """Looks at all examples."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


def own_layers():
    return compiled(net(Gated(), Centered()), loss=None)


class OwnStep(keras.Model):
    """Scales its loss, and clips the gradients itself."""

    def __init__(self):
        super().__init__()
        self.net = net(layers.BatchNormalization())
        self.mean = keras.metrics.Mean("mean")

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, labels = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, weights)
        self.optimizer.apply([tf.clip_by_norm(g, 1e4) for g in gradients], weights)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}


class Adversaries(keras.Model):
    """A generator and a discriminator, each with an optimizer that scales its loss."""

    def __init__(self):
        super().__init__()
        self.judge, self.forger = net(units=1), net(units=4)
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.compile()
        self.for_judge, self.for_forger = (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2)
        )

    def train_step(self, data):
        noise, _ = data
        real = noise[:, ::-1] + 1.0
        both = tf.concat([self.forger(noise), real], axis=0)
        labels = tf.concat([tf.ones_like(noise[:, :1]), tf.zeros_like(noise[:, :1])], axis=0)
        judged = self.update(self.for_judge, self.judge, lambda: (labels, self.judge(both)))
        forged = self.update(
            self.for_forger,
            self.forger,
            lambda: (tf.zeros_like(noise[:, :1]), self.judge(self.forger(noise))),
        )
        return {"judged": judged, "forged": forged}

    def update(self, optimizer, part, compute):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*compute())
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, part.trainable_variables), part.trainable_variables)
        return loss


@pytest.mark.parametrize(
    ("build", "x", "y", "policy"),
    [
        (stock, X, Y, "mixed_float16"),
        (masked, TOKENS, TOKENS, "mixed_bfloat16"),
        (own_layers, X, Y, "mixed_bfloat16"),
        (lambda: compiled(OwnStep(), loss=None), X, Y, "mixed_float16"),
        (Adversaries, X, Y, "mixed_float16"),
    ],
    ids=["stock", "a masked loss", "own layers", "own step", "adversaries"],
)
def test_half_precision_trains_as_on_one_device_to_its_rounding(build, x, y, policy, capfd):
    of = Program("in half precision", build, lambda: {"x": x, "y": y, "batch_size": 7})
    with outcomes.policy(policy):
        outcomes.on_one_device(of, None, policy)
        capfd.readouterr()  # what TensorFlow says when it starts
        assert outcomes.compared(of, 2) <= TOLERANCES[policy]
    assert capfd.readouterr() == ("", "")
