"""Steps and layers in which the examples of a batch meet, each in one way, as strangers write them.

Replicas that see their own examples alone train something else.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def examples():
    random = np.random.default_rng(0)
    x = random.normal(size=(17, 6)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, 17), "batch_size": 7}


class Stepping(keras.Model):
    """A classifier with a step to override in parts."""

    def __init__(self, **parts):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)]
        )
        self.parts = parts

    def call(self, x, training=False):
        return self.net(x, training=training)

    def losses_of(self, y, logits):
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.parts.get("loss", mean_loss)(self, x, y, logits)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        gradients = self.parts.get("change", lambda gradients: gradients)(gradients)
        self.parts.get("apply", apply)(self, gradients, weights)
        logs = self.parts.get("logs", lambda *_: {})(self, x, y, logits)
        return {"loss": ops.mean(loss), **logs}


def mean_loss(model, x, y, logits):  # noqa: ARG001  # as its like
    return ops.mean(model.losses_of(y, logits))


def apply(model, gradients, weights):
    model.optimizer.apply(gradients, weights)


def step(**parts):
    def build():
        model = Stepping(**parts)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


def net(*middle, loss=None, **settings):
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), *(make() for make in middle), layers.Dense(3)]
        )
        loss_fn = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss_fn, **settings)
        return model

    return build


class SummedActivity(layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * ops.sum(ops.square(x)))
        return x


class Whitening(layers.Layer):
    """Batch statistics by hand."""

    def call(self, x):
        return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


class Counting(layers.Layer):
    """Adds up what it has seen, in a variable that it reads."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)

    def call(self, x):
        self.seen.assign_add(ops.sum(ops.abs(x), axis=0))
        return x


class OverTheBatch(layers.Layer):
    def call(self, x):
        return x * ops.softmax(x, axis=0)


class Calls(keras.metrics.Metric):
    """Counts how often it is called."""

    def __init__(self):
        super().__init__(name="calls")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):  # noqa: ARG002  # Keras'
        self.count.assign_add(1.0)

    def result(self):
        return ops.convert_to_tensor(self.count)


def assign_by_hand(model, gradients, weights):  # noqa: ARG001  # as its like
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


def in_batch_negatives(model, x, y, logits):  # noqa: ARG001
    logits = ops.normalize(logits, axis=1)
    similarities = ops.matmul(logits, ops.transpose(ops.normalize(x[:, :3], axis=1)))
    labels = ops.arange(ops.shape(logits)[0])
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
    )


def ranking(model, x, y, logits):  # noqa: ARG001
    scores, wanted = logits[:, 0], ops.cast(y, logits.dtype)
    margins = ops.relu(1.0 - (scores[:, None] - scores[None]))
    better = ops.cast(wanted[:, None] > wanted[None], margins.dtype)
    return ops.sum(margins * better) / (ops.sum(better) + 1.0)


def by_positives(model, x, y, logits):  # noqa: ARG001
    positive = ops.cast(ops.equal(y, 1), logits.dtype)
    losses = model.losses_of(y, logits)
    return ops.sum(losses) / (ops.sum(positive) + 1.0)


def decorrelation(model, x, y, logits):
    centered = logits - ops.mean(logits, axis=0)
    covariance = ops.matmul(ops.transpose(centered), centered) / 7.0
    return mean_loss(model, x, y, logits) + ops.mean(ops.square(covariance - ops.eye(3)))


def hardest(model, x, y, logits):  # noqa: ARG001
    """Train on half of the examples: those with the largest losses."""
    losses = model.losses_of(y, logits)
    half = (ops.shape(losses)[0] + 1) // 2
    return ops.mean(tf.math.top_k(losses, k=half).values)


def signs(gradients):
    return [ops.sign(gradient) for gradient in gradients]


class OfSigns(keras.optimizers.SGD):
    def apply(self, gradients, trainable_variables=None):
        super().apply(signs(gradients), trainable_variables)


def stepping_by_signs():
    model = Stepping()
    model.compile(OfSigns(0.1))
    return model


def clip_all(gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


BUILDERS = {
    "a loss summed by hand": step(loss=lambda m, x, y, z: ops.sum(m.losses_of(y, z))),
    "a loss that nobody reduces": step(loss=lambda m, x, y, z: m.losses_of(y, z)),
    "one of two losses is summed": step(
        loss=lambda m, x, y, z: mean_loss(m, x, y, z) + 0.01 * ops.sum(ops.square(z))
    ),
    "add_loss of a sum": net(SummedActivity),
    "gradients clipped by their global norm in the step": step(change=clip_all),
    "gradients divided by their norms": step(
        change=lambda gradients: [g / (tf.norm(g) + 1e-6) for g in gradients]
    ),
    "batch statistics by hand": net(Whitening),
    "negatives of the batch": step(loss=in_batch_negatives),
    "the batch's largest logit": step(
        loss=lambda m, x, y, z: mean_loss(m, x, y, z / ops.max(ops.abs(z)))
    ),
    "normalization by the batch's mean": step(
        loss=lambda m, x, y, z: mean_loss(m, x, y, z / (1e-3 + ops.mean(ops.square(z))))
    ),
    "a softmax over the batch": net(OverTheBatch),
    "a metric that counts calls": lambda: net(metrics=[Calls()])(),
    "a log that is a sum": step(logs=lambda m, x, y, z: {"right": ops.sum(ops.relu(z))}),
    "weights assigned by hand": step(apply=assign_by_hand),
    "labels in the reverse order of the batch": step(
        loss=lambda m, x, y, z: mean_loss(m, x, tf.reverse(y, [0]), z)
    ),
    "labels of the neighbour": step(loss=lambda m, x, y, z: mean_loss(m, x, tf.roll(y, 1, 0), z)),
    "pairs of the batch are ranked": step(loss=ranking),
    "a variable that adds up the batch": net(Counting),
    "a loss over the number of positives": step(loss=by_positives),
    "the batch's covariance": step(loss=decorrelation),
    "a sum over a constant batch size": step(
        loss=lambda m, x, y, z: tf.nn.compute_average_loss(m.losses_of(y, z), global_batch_size=7)
    ),
    "the hardest half of the batch": step(loss=hardest),
    "signs of gradients": step(change=signs),
    "random numbers that Keras draws": step(
        loss=lambda m, x, y, z: mean_loss(m, x, y, z + keras.random.normal(ops.shape(z)))
    ),
}
PROGRAMS = [
    Program(name, build, examples, backends=("tensorflow",)) for name, build in BUILDERS.items()
]
