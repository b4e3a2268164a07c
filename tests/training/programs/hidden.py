"""Steps whose first examples do not show what they do with others, or later."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

_ROWS = 17


def _x():
    return np.random.default_rng(0).normal(size=(_ROWS, 4)).astype("float32")


def _y():
    return np.random.default_rng(1).integers(0, 3, _ROWS)


def _data(x=None, y=None):
    return {"x": _x() if x is None else x, "y": _y() if y is None else y, "batch_size": 7}


def _labeled_at_first():
    """Give labels of which none of the first seven is missing, and all of the last three."""
    y = np.where(np.arange(_ROWS) % 4 == 3, -1, _y())
    y[:7] = _y()[:7]
    y[14:] = -1
    return _data(y=y)


def _one_class_at_first():
    return _data(y=np.sort(_y()))


def _small_at_first():
    x = _x()
    x[:7] *= 0.01
    return _data(x=x)


def _alike_at_first():
    x = _x()
    x[:7] = x[0]
    return _data(x=x)


def _cross_entropies(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


class Custom(keras.Model):
    """A classifier whose step has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def loss_of(self, x, y):
        return ops.mean(_cross_entropies(y, self.net(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class OverLabeled(Custom):
    def loss_of(self, x, y):
        is_labeled = ops.cast(y >= 0, "float32")
        losses = is_labeled * _cross_entropies(ops.maximum(y, 0), self.net(x))
        return ops.sum(losses) / ops.maximum(ops.sum(is_labeled), 1e-3)


class OfLabeled(Custom):
    """Picks those that have a label."""

    def loss_of(self, x, y):
        is_labeled = tf.concat([[True], y[1:] >= 0], axis=0)
        y, logits = (tf.boolean_mask(of, is_labeled) for of in (tf.maximum(y, 0), self.net(x)))
        return tf.reduce_mean(_cross_entropies(y, logits))


class Balanced(Custom):
    """Weighs examples by how many of the batch have their class."""

    def loss_of(self, x, y):
        counts = ops.sum(ops.one_hot(y, 3), axis=0)
        weights = ops.take(1.0 / ops.maximum(counts, 1.0), y)
        return ops.mean(weights * _cross_entropies(y, self.net(x)))


class Hardest(Custom):
    def loss_of(self, x, y):
        losses = _cross_entropies(y, self.net(x))
        return ops.mean(tf.math.top_k(losses, k=tf.minimum(5, tf.shape(losses)[0])).values)


class FreeBits(Custom):
    """Leaves every unit free up to an amount."""

    def loss_of(self, x, y):
        of_units = ops.mean(ops.square(self.net(x)), axis=0)
        return super().loss_of(x, y) + ops.sum(ops.maximum(of_units, 0.05))


class Threshold(Custom):
    """Counts what is more certain than the batches so far."""

    def __init__(self):
        super().__init__()
        self.tau = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def loss_of(self, x, y):
        logits = self.net(x)
        certain = ops.max(ops.softmax(logits), axis=1)
        self.tau.assign(0.1 * self.tau + 0.9 * ops.mean(certain))
        return ops.mean(ops.cast(certain >= self.tau, "float32") * _cross_entropies(y, logits))


class Seen(Custom):
    """Counts the examples in an integer."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def loss_of(self, x, y):
        return (1.0 + ops.cast(self.seen, "float32") / 10.0) * super().loss_of(x, y)

    def train_step(self, data):
        logs = super().train_step(data)
        self.seen.assign_add(ops.shape(data[0])[0])
        return logs


class InTurn(Custom):
    """Contrasts the examples in three of four steps."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def contrast(self):
        return ops.cast(self.steps % 4, "float32") / 4.0

    def loss_of(self, x, y):
        logits = self.net(x)
        similar = ops.logsumexp(ops.matmul(logits, ops.transpose(logits)), axis=1)
        return super().loss_of(x, y) + self.contrast() * ops.mean(similar)

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1)
        return logs


class Faded(InTurn):
    """Contrasts when a callback has switched it on."""

    def __init__(self):
        super().__init__()
        self.alpha = self.add_weight(shape=(), initializer="ones", trainable=False)

    def contrast(self):
        return 1.0 - self.alpha


class _Fading(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        self.model.alpha.assign(1.0 - 0.5 * epoch)


class Capacity(layers.Layer):
    """Two experts, each of which takes the first few examples that want it."""

    def __init__(self):
        super().__init__()
        self.gate = layers.Dense(2)
        self.experts = [layers.Dense(4), layers.Dense(4)]

    def call(self, x):
        member = ops.one_hot(ops.argmax(self.gate(x), axis=-1), 2)
        places = ops.cumsum(member, axis=0) * member
        member = member * ops.cast(places <= 3.0, "float32")
        return sum(member[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def _with_capacity():
    model = keras.Sequential([keras.Input((4,)), Capacity(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class Memory(layers.Layer):
    """Reads as many rows as a batch has from a table."""

    def call(self, x, table):
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(table))), table)


class Remembering(Custom):
    def __init__(self):
        super().__init__()
        self.read = Memory()
        self.table = tf.constant(np.random.default_rng(2).normal(size=(7, 3)), tf.float32)

    def loss_of(self, x, y):
        z = self.net(x)
        read = self.read(z, self.table)
        return ops.mean(_cross_entropies(y, read)) + ops.norm(ops.mean(z, axis=0))


class Eager(InTurn):
    def contrast(self):
        return ops.cast(self.steps >= 3, "float32")


class Surprised(layers.Layer):
    """Scales what it is given when one entry of it is large."""

    def call(self, x):
        return x * ops.where(ops.max(ops.abs(x)) > 2.5, 0.5, 1.0)


def _behind_an_identity():
    features = [keras.Input((4,)), Surprised(), layers.Identity(), layers.Dense(3)]
    model = keras.Sequential(features)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def _one_large_at_the_end():
    x = np.clip(_x(), -2.0, 2.0)
    x[15, 1] = 3.0
    return _data(x=x)


def _custom(make, **settings):
    def build():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), **settings)
        return model

    return build


class NonNegative(Custom):
    """Adds up by how much outputs are negative; none of the first ones is."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, bias_initializer=keras.initializers.Constant(2.0))]
        )

    def loss_of(self, x, y):
        outputs = self.net(x)
        return ops.mean(_cross_entropies(y, outputs)) + ops.sum(ops.relu(-outputs))


class Displaced(layers.Layer):
    """Adds a displacement that is zero at first, and a loss of its squares."""

    def build(self, shape):
        self.displacement = layers.Dense(shape[-1], kernel_initializer="zeros")
        self.displacement.build(shape)

    def call(self, x):
        displacement = self.displacement(x)
        self.add_loss(0.1 * ops.sum(ops.square(displacement)))
        return x + displacement


def _displaced():
    model = keras.Sequential([keras.Input((4,)), Displaced(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class EveryThird(Custom):
    """Adds the squares of all outputs in every third step."""

    def loss_of(self, x, y):
        outputs = self.net(x)
        is_third = ops.cast(self.optimizer.iterations % 3 == 2, outputs.dtype)
        return ops.mean(_cross_entropies(y, outputs)) + 0.01 * is_third * ops.sum(outputs**2)


class Alternating(Custom):
    """Trains on every other example without what it is given, by its position in the batch."""

    def loss_of(self, x, y):
        is_given = ops.cast(ops.arange(ops.shape(x)[0]) % 2, x.dtype)
        return ops.mean(_cross_entropies(y, self.net(x * is_given[:, None])))


class FirstThree(Custom):
    """Trains on the first three examples of a batch alone."""

    def loss_of(self, x, y):
        is_first = ops.cast(ops.arange(ops.shape(x)[0]) < 3, x.dtype)
        return ops.mean(_cross_entropies(y, self.net(x)) * is_first)


class FullBatches(Custom):
    """Leaves batches out that have another size than most."""

    def loss_of(self, x, y):
        is_full = ops.cast(ops.equal(ops.shape(x)[0], 7), x.dtype)
        return is_full * ops.mean(_cross_entropies(y, self.net(x)))


class Counting(Custom):
    """Logs how many examples of a class it has seen; the first batch has none."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        self.seen.update_state(ops.sum(ops.cast(ops.equal(data[1], 2), "float32")))
        return super().train_step(data) | {"seen": self.seen.result()}


def _program(name, make, data=_data, **settings):
    return Program(name, _custom(make, **settings), data, backends=("tensorflow",))


PROGRAMS = [
    _program("a mean over the labeled", OverLabeled, _labeled_at_first),
    _program("the labeled alone", OfLabeled, _labeled_at_first),
    _program("weights by the counts of classes", Balanced, _one_class_at_first),
    _program("the hardest examples", Hardest),
    _program("free bits of every unit", FreeBits, _small_at_first),
    _program("a threshold of the step's own", Threshold, _alike_at_first),
    _program("a count of examples", Seen),
    _program("a loss in three of four steps", InTurn),
    _program("a sum of what is negative, which nothing is at first", NonNegative),
    Program("add_loss of a sum that is zero at first", _displaced, _data),
    _program("a sum in every third step", EveryThird),
    _program("every other example by its position", Alternating),
    _program("the first three examples of a batch", FirstThree),
    _program("full batches alone", FullBatches),
    _program("a count of a class that comes later", Counting, _one_class_at_first),
    _program(
        "a loss that a callback fades in", Faded, lambda: _data() | {"callbacks": [_Fading()]}
    ),
    Program("experts of a constant capacity", _with_capacity, _data, backends=("tensorflow",)),
    Program(
        "a layer that is surprised, and one that does nothing",
        _behind_an_identity,
        _one_large_at_the_end,
        backends=("tensorflow",),
    ),
    _program("a table of as many rows as a batch", Remembering),
    _program("eager, and another loss later", Eager, run_eagerly=True),
]
