"""Programs in half precision: two replicas train one device's weights to its rounding, silently."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from kdpkit.testing._toys import off_by
from tests.training.programs import CustomStep, Program, network, outcomes, vectors
from tests.training.programs import sparse_cross_entropy as cross_entropy
from tests.training.test_programs import ALL

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]


class ScalingStep(CustomStep):
    """Scales its loss for each of two optimizers, and clips the gradients itself."""

    def __init__(self):
        norm, head = layers.BatchNormalization(), layers.Dense(3, dtype="float32")
        super().__init__(keras.Sequential([network(8), norm, head]))
        self.compile(keras.optimizers.SGD(0.1), cross_entropy())  # which Keras has scale it
        self.other = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    def train_step(self, data):
        x, labels = data
        weights, optimizers = self.trainable_variables, (self.optimizer, self.other)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=labels, y_pred=self(x, training=True))
            scaled = [optimizer.scale_loss(loss) for optimizer in optimizers]
        parts = zip(optimizers, scaled, (weights[:2], weights[2:]), strict=True)
        for optimizer, scaled_loss, part in parts:
            gradients = tape.gradient(scaled_loss, part)
            optimizer.apply([tf.clip_by_norm(g, 1e4) for g in gradients], part)
        return {"loss": loss}


PROGRAMS = {program.name: program for program in [*ALL, Program("scaling", ScalingStep, vectors)]}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("scaling", "mixed_float16"),
        ("adversaries", "mixed_float16"),
        ("masked language model with sample weights", "mixed_bfloat16"),
    ],
)
def test_half_precision_trains_as_on_one_device_to_its_rounding(name, policy, capfd):
    """Replicas differ by less than half of what this precision differs from float32."""
    before, exact, _ = outcomes.on_one_device(PROGRAMS[name], None, "float32")
    with outcomes.policy(policy):
        _, rounded, _ = outcomes.on_one_device(PROGRAMS[name], None, policy)
        capfd.readouterr()  # TensorFlow writes lines when it starts
        difference = outcomes.compared(PROGRAMS[name], 2)
    start = before or [0 * weight for weight in exact]
    rounding = off_by(rounded, exact, start)
    assert rounding > 1e-5
    assert difference <= rounding / 2
    assert capfd.readouterr() == ("", "")
