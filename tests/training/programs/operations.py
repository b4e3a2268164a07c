"""Steps that depend on how a batch is split in one operation, layer or function of theirs.

The first examples are such that it does not show: the step's graph has to.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program
from tests.training.programs.hidden import Custom, _cross_entropies, _custom, _data, _x, _y

_WORDS = [f"w{i}" for i in range(12)]
_LENGTHS = [4] * 7 + [2, 7, 3, 4, 1, 5, 6, 2, 8, 3]  # of texts


def _compiled(*parts, loss=None):
    def build():
        made = [part() for part in parts]
        model = keras.Sequential([keras.Input((4,)), *made])
        sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss or sparse)
        return model

    return build


def _three_classes():
    return layers.Dense(3)


def _small_at_first(scale=0.01):
    x = _x()
    x[:7] *= scale
    return _data(x=x)


def _texts():
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(_WORDS, length)) for length in _LENGTHS]
    return _data(x=tf.constant(texts))


def _of_texts():
    texts = keras.Input((), dtype="string")
    tokens = layers.TextVectorization(vocabulary=_WORDS)(texts)  # pads to the longest
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(14, 5)(tokens))
    model = keras.Model(texts, layers.Dense(3)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class OfTokens(Custom):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input(()), layers.Embedding(14, 4), layers.Dense(14)])

    def loss_of(self, x, y):  # noqa: ARG002  # labels of other programs
        return ops.mean(_cross_entropies(x.flat_values, self.net(x.flat_values)))


def _ragged():
    tokens = np.random.default_rng(0).integers(1, 14, sum(_LENGTHS))
    ragged = tf.RaggedTensor.from_row_lengths(tokens, _LENGTHS)
    return {"x": tf.data.Dataset.from_tensor_slices((ragged, _y())).batch(7)}


class Bag(keras.Model):
    """Pads ragged tokens by itself, and is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.classify = layers.Embedding(14, 4), layers.Dense(3)

    def call(self, x):
        return self.classify(ops.mean(self.embedding(x.to_tensor()), axis=1))


def _bag():
    model = Bag()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


class OfRatings(Custom):
    def __init__(self):
        super().__init__()
        sparse = keras.Input((6,), sparse=True)
        self.net = keras.Sequential([sparse, layers.Dense(3), layers.Dense(6)])

    def loss_of(self, x, y):  # noqa: ARG002  # labels of other programs
        given = tf.gather_nd(self.net(x), x.indices)
        return tf.reduce_mean((given - tf.cast(x.values, given.dtype)) ** 2)


def _sparse():
    random = np.random.default_rng(0)
    dense = np.zeros((17, 6), "float32")
    for row, count in enumerate([3] * 7 + [1, 6, 2, 5, 1, 4, 2, 6, 1, 3]):
        dense[row, random.choice(6, count, replace=False)] = random.normal(size=count) + 3
    return {"x": tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), _y())).batch(7)}


class NoiseForAll(layers.Layer):
    """Adds the same numbers to every example: as many as each has entries, or a batch examples."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal((4,), seed=self.seeds)


def _of_four():
    dataset = tf.data.Dataset.from_tensor_slices((_x(), _y()))
    return {"x": dataset.batch(4, drop_remainder=True)}


def _scaled_by_the_largest(x):
    return x / ops.maximum(1.0, ops.max(ops.abs(x)))


class OfMean(Custom):
    def __init__(self):
        super().__init__()
        self.relu = layers.ReLU()

    def loss_of(self, x, y):
        z = self.net(x)
        large = self.relu(ops.mean(ops.square(z), axis=0) - 0.05)
        return ops.mean(_cross_entropies(y, z)) + ops.sum(large)


@tf.function
def _focal(y, z):
    y = tf.cast(tf.reshape(y, (-1,)) > 0, z.dtype)
    p = tf.sigmoid(z[:, 0])
    missed = y * (1 - p) ** 2 * tf.math.log(p + 1e-6)
    mistaken = (1 - y) * p**2 * tf.math.log(1 - p + 1e-6)
    return -3.0 * (missed + mistaken) / tf.maximum(tf.reduce_sum(y), 1.0)


def _no_positives_at_first():
    y = _y()
    y[:8] = 0
    return _data(y=y)


class Switched(Custom):
    """Weighs losses by the largest when a callback has switched it on."""

    def __init__(self):
        super().__init__()
        self.hard = tf.Variable(False, trainable=False)

    def loss_of(self, x, y):
        losses = _cross_entropies(y, self.net(x))
        weighed = lambda: losses * losses / tf.reduce_max(losses)  # noqa: E731  # as published
        return tf.reduce_mean(tf.cond(self.hard, weighed, lambda: losses))


class _SwitchingOn(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        self.model.hard.assign(epoch > 0)


class Equilibrium(layers.Layer):
    """Iterates until nothing changes any more, for any example."""

    def build(self, shape):
        normal = keras.initializers.RandomNormal(stddev=0.4, seed=1)
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer=normal)

    def call(self, x):
        def body(step, z, change):  # noqa: ARG001  # of the loop
            new = tf.tanh(tf.matmul(z, self.kernel) + x)
            return step + 1, new, tf.reduce_max(tf.abs(new - z))

        start = (tf.constant(0), tf.zeros_like(x), tf.ones((), x.dtype))
        return tf.while_loop(lambda i, _, change: (i < 40) & (change > 1e-3), body, start)[1]


@tf.custom_gradient
def _with_clipped_gradient(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.5)


class Clipping(layers.Layer):
    def call(self, x):
        return _with_clipped_gradient(x)


def _large_errors_later():
    y = 3 * np.random.default_rng(2).normal(size=(17, 3)).astype("float32")
    y[:7] *= 0.003
    return {**_small_at_first(0.003), "y": y}


class ByCount(Custom):
    """Divides by how many examples are confident, counted by a shape."""

    def loss_of(self, x, y):
        z = self.net(x)
        confident = tf.reduce_max(tf.nn.softmax(z), axis=-1) > 0.45
        count = tf.cast(tf.shape(tf.where(confident))[0], z.dtype)
        losses = _cross_entropies(y, z) * tf.cast(confident, z.dtype)
        return tf.reduce_sum(losses) / tf.maximum(count, 1.0)


def _alike_at_first():
    x, y = _x(), _y()
    x[:7], y[:7] = x[0], y[0]
    return _data(x=x, y=y)


class OfPairs(Custom):
    """Pushes every two of a batch apart."""

    def loss_of(self, x, y):
        z = self.net(x)
        alike = tf.einsum("if,jf->ij", z, z)
        return ops.mean(_cross_entropies(y, z)) + tf.reduce_mean(tf.nn.relu(alike - 1.0))


class OfNeighbors(Custom):
    def loss_of(self, x, y):
        z = self.net(x)
        apart = tf.reduce_sum(tf.abs(z - z[::-1]), axis=-1)
        return ops.mean(_cross_entropies(y, z)) + tf.reduce_mean(tf.nn.relu(apart - 0.5))


class Hazard(Custom):
    """Cox' partial likelihood of times that are in order."""

    def loss_of(self, x, y):
        risk = self.net(x)[:, 0]
        later = tf.math.cumulative_logsumexp(risk, reverse=True)
        return -tf.reduce_mean(tf.cast(y > 0, risk.dtype) * (risk - later))


def _of_mixed_images():
    images, labels = keras.Input((6, 6, 3)), keras.Input((3,))
    mix = layers.CutMix(seed=1)
    mixed = mix({"images": images, "labels": labels})
    model = keras.Model([images, labels], layers.Dense(3)(layers.Flatten()(mixed["images"])))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def _images():
    images = np.random.default_rng(0).uniform(size=(17, 6, 6, 3)).astype("float32")
    labels = keras.utils.to_categorical(_y(), 3).astype("float32")
    return {"x": [images, labels], "y": labels, "batch_size": 7}


def _program(name, build, data):
    return Program(name, build, data, backends=("tensorflow",))


PROGRAMS = [
    _program("texts padded to the longest", _of_texts, _texts),
    _program("a mean over ragged tokens", _custom(OfTokens), _ragged),
    _program("ragged tokens that the model pads", _bag, _ragged),
    _program("a mean over sparse ratings", _custom(OfRatings), _sparse),
    _program("the same noise for all", _compiled(NoiseForAll, _three_classes), _of_four),
    _program(
        "a layer's activation of the batch",
        _compiled(lambda: layers.Dense(5, activation=_scaled_by_the_largest), _three_classes),
        _small_at_first,
    ),
    _program("a layer on a mean", _custom(OfMean), _small_at_first),
    _program(
        "a focal loss in a function",
        _compiled(lambda: layers.Dense(6, "tanh"), _three_classes, loss=_focal),
        _no_positives_at_first,
    ),
    _program(
        "a condition that a callback switches on",
        _custom(Switched),
        lambda: _data() | {"callbacks": [_SwitchingOn()]},
    ),
    _program(
        "a loop to a tolerance",
        _compiled(Equilibrium, _three_classes),
        lambda: _small_at_first(1e-4),
    ),
    _program(
        "a gradient of its own",
        _compiled(_three_classes, Clipping, loss="mse"),
        _large_errors_later,
    ),
    _program("a count from a shape", _custom(ByCount), _small_at_first),
    _program("pairs by einsum", _custom(OfPairs), _alike_at_first),
    _program("neighbors in reverse order", _custom(OfNeighbors), _alike_at_first),
    _program("a hazard of those who come later", _custom(Hazard), _no_positives_at_first),
    _program("images cut and mixed in the model", _of_mixed_images, _images),
]
