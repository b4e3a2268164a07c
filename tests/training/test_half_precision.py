"""Programs in half precision: two replicas train one device's weights to its rounding, silently."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.training.programs import Program, outcomes
from tests.training.test_programs import ALL

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]


class ScalingStep(keras.Model):
    """Scales its loss for each of two optimizers, and clips the gradients itself."""

    def __init__(self):
        super().__init__()
        hidden, head = layers.Dense(8, "tanh"), layers.Dense(3, dtype="float32")
        self.net = keras.Sequential([keras.Input((4,)), hidden, layers.BatchNormalization(), head])
        self.mean = keras.metrics.Mean("mean")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.compile(keras.optimizers.SGD(0.1), loss)  # which Keras has scale it
        self.other = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, labels = data
        weights, optimizers = self.trainable_variables, (self.optimizer, self.other)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=labels, y_pred=self(x, training=True))
            scaled = [optimizer.scale_loss(loss) for optimizer in optimizers]
        parts = zip(optimizers, scaled, (weights[:2], weights[2:]), strict=True)
        for optimizer, of_optimizer, part in parts:
            gradients = tape.gradient(of_optimizer, part)
            optimizer.apply([tf.clip_by_norm(g, 1e4) for g in gradients], part)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(17, 4)).astype("float32")
    return {"x": x, "y": (x @ random.normal(size=(4, 3))).argmax(axis=1), "batch_size": 7}


def distance(one, other):
    return max(np.abs(a - b).max(initial=0) for a, b in zip(one, other, strict=True))


PROGRAMS = {program.name: program for program in [*ALL, Program("scaling", ScalingStep, data)]}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("built-in training with dropout and batch statistics", "mixed_float16"),
        ("scaling", "mixed_float16"),
        ("adversaries", "mixed_float16"),
        ("masked language model with sample weights", "mixed_bfloat16"),
        ("mixup in the step", "mixed_bfloat16"),
    ],
)
def test_half_precision_trains_as_on_one_device_to_its_rounding(name, policy, capfd):
    """What it rounds off is what it differs by from float32."""
    before, exact, _ = outcomes.on_one_device(PROGRAMS[name], None, "float32")
    with outcomes.policy(policy):
        _, rounded, _ = outcomes.on_one_device(PROGRAMS[name], None, policy)
        capfd.readouterr()  # what TensorFlow says when it starts
        found = outcomes.compared(PROGRAMS[name], 2)
    rounding = distance(rounded, exact) / distance(before or [0 * of for of in exact], exact)
    assert rounding > 1e-5
    assert found <= rounding / 2
    assert capfd.readouterr() == ("", "")
