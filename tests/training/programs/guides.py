"""The Keras guides: built-in training, and steps of one's own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import (
    TENSORFLOW,
    CustomStep,
    classifier,
    compile_model,
    network,
    numbers,
    program,
    vectors,
)

program("built-in training with dropout and batch statistics")(
    classifier(
        lambda: layers.Dense(16, activation="relu"),
        layers.BatchNormalization,
        lambda: layers.Dropout(0.3),
        optimizer="rmsprop",
        metrics=["accuracy"],
    )
)


class LogisticEndpoint(layers.Layer):
    """Computes the loss and the accuracy, and returns the predictions."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, targets, logits, sample_weight=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weight))
        self.accuracy.update_state(targets, logits, sample_weight)
        return ops.softmax(logits)


def inputs_and_targets():
    targets = np.random.default_rng(1).integers(0, 2, (17, 10)).astype("float32")
    return {"x": {"inputs": vectors()["x"], "targets": targets}, "batch_size": 7}


# On JAX stock Keras cannot update a layer's metric in a step, on one device either.
@program("a layer that computes loss and accuracy", inputs_and_targets, **TENSORFLOW, run="quick")
def with_endpoint():
    inputs, targets = keras.Input((6,), name="inputs"), keras.Input((10,), name="targets")
    predictions = LogisticEndpoint(name="predictions")(targets, layers.Dense(10)(inputs))
    return compile_model(keras.Model([inputs, targets], predictions), "adam")


# Steps of one's own, complete as in the guides.


class LowLevelModel(keras.Model):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


@program("train_step with its own loss and trackers", numbers, **TENSORFLOW, run="quick")
def low_level():
    inputs = keras.Input((6,))
    return compile_model(LowLevelModel(inputs, layers.Dense(1)(inputs)), "adam")


class Regression(CustomStep):
    def __init__(self):
        super().__init__(network(1))


@program("train_step that divides by the number of replicas", numbers, optimizer="adam", run="slow")
class DividedLoss(Regression):
    def step_loss(self, x, y):
        loss = ops.mean(keras.losses.mean_squared_error(y, self(x)))
        return loss / tf.distribute.get_strategy().num_replicas_in_sync


@program(
    "train_step that clips by the global norm", numbers, loss="mse", metrics=["mae"], run="slow"
)
class ClippedByGlobalNorm(Regression):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}
