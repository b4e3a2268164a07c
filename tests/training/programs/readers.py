"""Small programs that hostile readers wrote, which were wrong on replicas, or ended in a crash."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(17, 6)).astype("float32")
LABELS = RANDOM.integers(0, 3, 17).astype("int32")
WORDS = RANDOM.integers(0, 6, (17, 2)).astype("int32")


def classified(scale=1):
    return {"x": X * np.float32(scale), "y": LABELS, "batch_size": 5}


def softmax_classifier(loss, **settings):
    """A classifier whose loss, of Keras, uses the logits behind the softmax."""

    def build():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, "relu"), layers.Dense(3, "softmax")]
        )
        model.compile(keras.optimizers.SGD(0.01), loss(), **settings)
        return model

    return build


def confidence(_, y_pred):
    return ops.mean(ops.max(y_pred, -1))


def of_probabilities():
    return keras.losses.SparseCategoricalCrossentropy()


def of_logits_though_they_are_none():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def cross_entropy(labels, logits):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


class OwnStep(keras.Model):
    """A step whose loss is written by `loss_of`."""

    def __init__(self):
        super().__init__()
        self.features, self.head = layers.Dense(4, "tanh"), layers.Dense(3)

    def build(self, shape):
        self.features.build(shape)
        self.head.build((None, 4))
        self.built = True

    def call(self, x):
        return self.head(self.features(x))

    def loss_of(self, x, y):
        return cross_entropy(y, self(x))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def compiled(kind, optimizer=lambda: keras.optimizers.SGD(0.1)):
    def build():
        model = kind()
        model.build((None, 6))
        model.compile(optimizer())
        return model

    return build


class BagAttention(OwnStep):
    """Weighs the examples by a softmax over the batch."""

    def __init__(self):
        super().__init__()
        self.score, self.softmax = layers.Dense(1), layers.Activation("softmax")

    def build(self, shape):
        super().build(shape)
        self.score.build((None, 4))

    def loss_of(self, x, y):
        features = self.features(x)
        weights = self.softmax(self.score(features)[:, 0])
        pooled = ops.sum(weights[:, None] * features, axis=0, keepdims=True)
        return cross_entropy(y, self.head(features)) + ops.mean(ops.square(self.head(pooled)))


class Endpoints(OwnStep):
    """Keeps its layers' outputs, by name, for the loss."""

    def call(self, x):
        features = self.features(x)
        self.endpoints = [("features", features), ("none", None)]
        return self.head(features)

    def loss_of(self, x, y):
        loss = cross_entropy(y, self(x))
        (_, features), _ = self.endpoints
        return loss + ops.mean(ops.square(features - ops.mean(features, axis=0)))


class BatchAccuracy(OwnStep):
    """Weighs the loss by the accuracy of the batch, and by that of all before."""

    def __init__(self):
        super().__init__()
        self.of_batch = keras.metrics.SparseCategoricalAccuracy()
        self.of_all = keras.metrics.SparseCategoricalAccuracy()

    def loss_of(self, x, y):
        logits = self(x)
        self.of_batch.reset_state()
        for metric in (self.of_batch, self.of_all):
            metric.update_state(y, logits)
        weight = 2.0 - self.of_batch.result() - 0.5 * self.of_all.total / self.of_all.count
        return weight * cross_entropy(y, logits)


class MetricsByHand(OwnStep):
    """Reads, halves and adds to the numbers of its metrics."""

    def __init__(self):
        super().__init__()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.average = keras.metrics.Mean()
        self.largest, self.used = keras.metrics.Mean(), keras.metrics.Sum()

    def loss_of(self, x, y):
        accuracy, average, logits = self.accuracy, self.average, self(x)
        for number in (accuracy.total, accuracy.count):
            number.assign(0.5 * number)
        loss = cross_entropy(y, logits) * (1.0 + accuracy.total / (accuracy.count + 1.0))
        accuracy.update_state(y, logits, sample_weight=0.5)
        self.used.update_state(self.features(x), sample_weight=0.5)
        self.largest.update_state(
            self.features(x), sample_weight=ops.cast(ops.shape(y)[0], "float32")
        )
        average.total.assign_add(loss)
        average.count.assign_add(1.0)
        return loss

    def train_step(self, data):
        super().train_step(data)
        counted = (self.accuracy, self.average, self.largest, self.used)
        return {str(number): metric.result() for number, metric in enumerate(counted)}


class CellsByHand(OwnStep):
    """Calls a recurrent cell with dropout step by step, as a decoder with attention does."""

    def __init__(self):
        super().__init__()
        self.cell = layers.GRUCell(4, dropout=0.4, recurrent_dropout=0.2, seed=3)

    def build(self, shape):
        super().build(shape)
        self.cell.build((None, 3))

    def loss_of(self, x, y):
        self.cell.reset_dropout_mask()
        self.cell.reset_recurrent_dropout_mask()
        state = self.features(x)
        for part in (x[:, :3], x[:, 3:]):
            _, (state,) = self.cell(part, [state], training=True)
        return cross_entropy(y, self.head(state))


class FrozenCritic(OwnStep):
    """Trains the head and clips it, then freezes it and trains what is below against it."""

    def __init__(self):
        super().__init__()
        self.critic_optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y = data
        self.head.trainable = True
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, self(x))
        own = self.head.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        for weight in self.head.trainable_weights:
            weight.assign(ops.clip(weight, -0.3, 0.3))
        self.head.trainable = False
        with tf.GradientTape() as tape:
            loss = -ops.mean(self(x))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class SemiSupervised(OwnStep):
    """Labeled examples, augmented, beside another number of unlabeled ones."""

    def __init__(self):
        super().__init__()
        self.loss_of_labeled = keras.losses.MeanSquaredError()

    def train_step(self, data):
        unlabeled, (x, y) = data
        return super().train_step((unlabeled, (x + 0.05, y)))

    def loss_of(self, unlabeled, labeled):
        x, y = labeled
        return self.loss_of_labeled(y, self(x)) + 0.1 * ops.mean(ops.square(self(unlabeled)))


def unlabeled_and_labeled():
    slices = tf.data.Dataset.from_tensor_slices
    targets = X[:12, :3] * X[:12, 3:]
    both = slices(X[:16]).batch(4), slices((X[:12], targets)).batch(3)
    return {"x": tf.data.Dataset.zip(both)}


class SkipGram(OwnStep):
    """Looks a table up in a layer, and once more by itself."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 4)
        self.table.build()

    def train_step(self, data):
        return super().train_step((data[:, 0], data[:, 1]))

    def loss_of(self, word, context):
        near = ops.sum(self.table(word) * ops.take(self.table.embeddings, context, axis=0), -1)
        return ops.mean(ops.softplus(-near)) + ops.mean(
            ops.square(self(ops.tile(near[:, None], 6)))
        )


class HessianVector(OwnStep):
    """Adds the curvature of the loss along its weights, by forward over reverse."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        tangents = [tf.ones_like(weight) for weight in weights]
        with tf.autodiff.ForwardAccumulator([w.value for w in weights], tangents) as forward:
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, self(x))
            gradients = tape.gradient(loss, weights)
        along = [forward.jvp(gradient) for gradient in gradients]
        steps = [g + 0.1 * h for g, h in zip(gradients, along, strict=True)]
        self.optimizer.apply_gradients(zip(steps, weights, strict=True))
        return {"loss": loss}


class Histogram(OwnStep):
    """Weighs the loss by how often the labels are in the batch."""

    def __init__(self):
        super().__init__()
        self.counts = layers.CategoryEncoding(3, output_mode="count")

    def loss_of(self, x, y):
        often = self.counts(y)
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        return ops.sum(losses / (1.0 + ops.take(often, y)))


class GhostNormalization(layers.Layer):
    """Normalizes the halves of a batch apart."""

    def build(self, shape):
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.norm.build(shape)
        super().build(shape)

    def call(self, x, training=False):
        half = ops.shape(x)[0] // 2
        parts = [self.norm(part, training=training) for part in (x[:half], x[half:])]
        return ops.concatenate(parts, axis=0)


class Toggled(layers.Layer):
    """Moves a center while a flag says so, which the step switches."""

    def build(self, shape):
        self.center = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
        self.moves = False

    def call(self, x):
        if self.moves:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return x - self.center


class SwitchesFlag(OwnStep):
    """Calls a layer twice, and moves its center once."""

    def __init__(self):
        super().__init__()
        self.centered = Toggled()

    def build(self, shape):
        super().build(shape)
        self.centered.build((None, 4))

    def loss_of(self, x, y):
        self.centered.moves = True
        features = self.centered(self.features(x))
        self.centered.moves = False
        again = self.centered(self.features(x * 1.1))
        return cross_entropy(y, self.head(features)) + ops.mean(ops.square(features - again))


def ghost():
    parts = [layers.Dense(8), GhostNormalization(), layers.ReLU(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *parts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def cosine():
    x = keras.Input((6,))
    model = keras.Model(x, layers.Dense(1)(x)[:, 0])
    metrics = [keras.metrics.CosineSimilarity(), "mae"]
    model.compile(
        keras.optimizers.SGD(0.1), lambda y, p: ops.mean(ops.square(y - p)), metrics=metrics
    )
    return model


def recurrent_classifier():
    parts = [layers.Reshape((3, 2)), layers.LSTM(4), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *parts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=True)
    return model


def two_attentions():
    """Keras calls the second one first here, and it takes the mask off what both are given."""
    words, others = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(9, 4, mask_zero=True)
    pair = embedding(words), embedding(others)
    attended = layers.Attention()([*pair]), layers.MultiHeadAttention(2, 3)(*pair)
    pooled = layers.GlobalAveragePooling1D()(layers.Concatenate()([*attended]))
    model = keras.Model([words, others], layers.Dense(3)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def padded_words():
    words = next_words()["x"]
    words[::2, 2:] = 0
    return {"x": [words, words[::-1].copy()], "y": LABELS, "batch_size": 5}


def next_word_model():
    import keras_hub

    model = keras.Sequential([keras.Input((5,)), layers.Embedding(9, 4), layers.Dense(9)])
    perplexity = keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=[perplexity])
    return model


def next_words():
    words = np.random.default_rng(1).integers(1, 9, (17, 6))
    words[::3, 3:] = 0
    return {"x": words[:, :-1], "y": words[:, 1:], "batch_size": 5}


def over_the_batch(x):
    return x - ops.mean(x, axis=0, keepdims=True)


class ChangesParts(keras.callbacks.Callback):
    """Gives a model that computes eagerly another optimizer and another activation."""

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        if epoch == 1:
            self.model.optimizer = keras.optimizers.SGD(0.05)
            self.model.layers[0].activation = over_the_batch


class Recompiles(keras.callbacks.Callback):
    """Compiles a model with another rate."""

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras'
        if epoch == 1:
            self.model.compile(keras.optimizers.SGD(0.05), cross_entropy)
            self.model.make_train_function()


def classifier(loss, **settings):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), loss, **settings)
        return model

    return build


def slow_adam():
    return keras.optimizers.Adam(0.05, epsilon=1e-2)


_OWN_STEPS = {
    "a softmax over the bag": (BagAttention, classified),
    "outputs kept by name": (Endpoints, classified),
    "a metric that is reset, and one that is read": (BatchAccuracy, classified),
    "numbers of metrics read and set by hand": (MetricsByHand, classified),
    "a cell with dropout, step by step": (CellsByHand, classified),
    "a critic that is frozen in the step": (FrozenCritic, classified),
    "labeled examples cut elsewhere": (SemiSupervised, unlabeled_and_labeled),
    "curvature by forward over reverse": (HessianVector, classified),
    "a histogram of the batch": (Histogram, classified),
    "a flag that the step switches": (SwitchesFlag, classified),
}
_PROGRAMS = {
    "softmax called logits, and a metric of one's own": (
        softmax_classifier(of_logits_though_they_are_none, metrics=[confidence]),
        classified,
    ),
    "softmax of large features, and a metric of one's own": (
        softmax_classifier(of_probabilities, metrics=[confidence]),
        lambda: classified(60),
    ),
    "a loss of Keras that is a function": (
        classifier(keras.losses.mean_squared_error),
        lambda: {"x": X, "y": X[:, :3], "batch_size": 5},
    ),
    "eager, and other parts later": (
        classifier("mse", run_eagerly=True),
        lambda: {"x": X, "y": X[:, :3], "batch_size": 5, "callbacks": [ChangesParts()]},
    ),
    "compiled once more in a callback": (
        classifier(cross_entropy),
        lambda: classified() | {"callbacks": [Recompiles()]},
    ),
    "the perplexity of KerasHub": (next_word_model, next_words),
    "attentions that share masked words": (two_attentions, padded_words),
    "a recurrent layer, compiled by XLA": (recurrent_classifier, classified),
    "softmax of large features, compiled by XLA": (
        softmax_classifier(of_probabilities, jit_compile=True),
        lambda: classified(60),
    ),
    "a table looked up in a layer and outside": (
        compiled(SkipGram, slow_adam),
        lambda: {"x": WORDS, "batch_size": 5},
    ),
    "halves of a batch normalized apart": (ghost, lambda: classified() | {"batch_size": 7}),
    "the cosine of predictions of one axis": (
        cosine,
        lambda: {"x": X, "y": X[:, 0] * X[:, 1], "batch_size": 5},
    ),
}
PROGRAMS = [
    *(Program(name, build, data, ("tensorflow",)) for name, (build, data) in _PROGRAMS.items()),
    *(
        Program(name, compiled(kind), data, ("tensorflow",))
        for name, (kind, data) in _OWN_STEPS.items()
    ),
]
