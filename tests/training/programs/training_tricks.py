"""Steps that do more than one gradient of one loss: gradients of gradients, accumulated ones."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import (
    CustomStep,
    cross_entropies,
    network,
    program,
    sparse_cross_entropy,
)


@program("input gradients of the logarithm of a loss")
class InputGradient(CustomStep):
    """Adds to a loss how much its logarithm changes with the inputs, by batch statistics too."""

    def __init__(self):
        norm = layers.BatchNormalization()
        super().__init__(keras.Sequential([network(4), norm, layers.Dense(3)]))

    def step_loss(self, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = super().step_loss(x, y)
            value = ops.log(loss)
        return loss + 10.0 * tf.reduce_sum(inner.gradient(value, x) ** 2)


@program("the gradient of each example is clipped", run="slow")
class ClippingEachExample(CustomStep):
    """Clips the gradient of each example by itself, as private training does (Abadi et al.)."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = cross_entropies(y, self(x, training=True))
        jacobians = tape.jacobian(losses, self.trainable_variables)
        flat = [tf.reshape(j, (tf.shape(j)[0], -1)) for j in jacobians]
        norms = tf.sqrt(sum(tf.reduce_sum(tf.square(j), axis=1) for j in flat))
        scale = 1.0 / tf.maximum(norms, 1.0)
        number = tf.cast(tf.shape(norms)[0], norms.dtype)
        gradients = [tf.tensordot(scale, j, 1) / number for j in jacobians]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(losses)}


@program("curvature by forward over reverse")
class HessianVector(CustomStep):
    """Adds the curvature of the loss along its weights."""

    def train_step(self, data):
        weights = self.trainable_variables
        tangents = [tf.ones_like(weight) for weight in weights]
        with tf.autodiff.ForwardAccumulator([w.value for w in weights], tangents) as forward:
            with tf.GradientTape() as tape:
                loss = self.step_loss(*data)
            gradients = tape.gradient(loss, weights)
        along = [forward.jvp(gradient) for gradient in gradients]
        steps = [g + 0.1 * h for g, h in zip(gradients, along, strict=True)]
        self.optimizer.apply_gradients(zip(steps, weights, strict=True))
        return {"loss": loss}


class Accumulating(CustomStep):
    """Adds up gradients in variables of its own, and applies them in every second step."""

    def __init__(self):
        super().__init__()
        self.counter = tf.Variable(0, trainable=False)
        weights = self.net.trainable_variables
        self.store = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]

    def train_step(self, data):
        x, y = data
        self.counter.assign_add(1)
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predictions)
        gradients = tape.gradient(loss, self.net.trainable_variables)
        for stored, gradient in zip(self.store, gradients, strict=True):
            stored.assign_add(gradient / 2)
        self.apply_if(tf.equal(self.counter % 2, 0))
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, predictions]))
        return {metric.name: metric.result() for metric in self.metrics}

    def apply_if(self, is_due):
        is_due = tf.cast(is_due, tf.float32)
        weights = self.net.trainable_variables
        self.optimizer.apply([stored * is_due for stored in self.store], weights)
        for stored in self.store:
            stored.assign(stored * (1 - is_due))


program("gradients added up in variables", loss=sparse_cross_entropy(), metrics=["accuracy"])(
    Accumulating
)


@program("gradients applied in a condition", loss=sparse_cross_entropy())
class AccumulatingInCondition(Accumulating):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.optimizer.build(self.net.trainable_variables)

    def apply_if(self, is_due):
        tf.cond(is_due, lambda: super(AccumulatingInCondition, self).apply_if(True), lambda: None)
