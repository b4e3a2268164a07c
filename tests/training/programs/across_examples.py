"""Steps and layers in which the examples of a batch meet, each in one way, as strangers write them.

Replicas that saw only their own examples would train something else. Often the first batch does not
show it: what happens to others, or later, is in the step's graph only.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import (
    CustomStep,
    classifier,
    compile_model,
    cross_entropies,
    mean_loss,
    network,
    on_tensorflow,
    program,
    small_at_first,
    vectors,
)

# Losses of a step, computed from the logits of all examples.


class StepWithLoss(CustomStep):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def step_loss(self, x, y):
        return self.function(x, y, self(x, training=True))


def of_constant_size(_, y, logits):
    return tf.nn.compute_average_loss(cross_entropies(y, logits), global_batch_size=7)


LOSSES = {
    "a loss summed by hand": lambda _, y, z: ops.sum(cross_entropies(y, z)),
    "a sum over a constant batch size": of_constant_size,
    "the batch's largest logit": lambda _, y, z: mean_loss(y, z / ops.max(ops.abs(z))),
    "random numbers that Keras draws": (
        lambda _, y, z: mean_loss(y, z + keras.random.normal(ops.shape(z)))
    ),
}
for _name, _loss in LOSSES.items():
    on_tensorflow(_name, lambda loss=_loss: compile_model(StepWithLoss(loss)))


# Steps that go on from a state, or that look at more than the loss.


@program("a loss in three of four steps", run="slow")
class InTurn(CustomStep):
    """Contrasts the examples in three of four steps."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def contrast(self):
        return ops.cast(self.steps % 4, "float32") / 4.0

    def step_loss(self, x, y):
        logits = self.net(x)
        similar = ops.logsumexp(ops.matmul(logits, ops.transpose(logits)), axis=1)
        return mean_loss(y, logits) + self.contrast() * ops.mean(similar)

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1)
        return logs


@program("eager, and another loss later", run_eagerly=True, run="slow")
class Eager(InTurn):
    def contrast(self):
        return ops.cast(self.steps >= 3, "float32")


@program("a sum of what is negative, which nothing is at first", run="slow")
class NonNegative(CustomStep):
    def __init__(self):
        bias = keras.initializers.Constant(4.0)
        super().__init__(keras.Sequential([layers.Dense(3, bias_initializer=bias)]))

    def step_loss(self, x, y):
        outputs = self.net(x)
        return mean_loss(y, outputs) + ops.sum(ops.relu(-outputs))


class Memory(layers.Layer):
    """Reads as many rows as a batch has from a table."""

    def call(self, x, table):
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(table))), table)


@program("a table of as many rows as a batch", run="slow")
class Remembering(CustomStep):
    def __init__(self):
        super().__init__()
        self.read = Memory()
        self.table = tf.constant(np.random.default_rng(2).normal(size=(7, 3)), tf.float32)

    def step_loss(self, x, y):
        z = self.net(x)
        return mean_loss(y, self.read(z, self.table)) + ops.norm(ops.mean(z, axis=0))


@program("weights assigned by hand", run="slow")
class AssigningStep(CustomStep):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = mean_loss(y, logits)
        weights = self.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss, "sum": ops.sum(ops.relu(logits))}


class Attention(layers.Layer):
    """Keeps its scores, their entropy, and what it has seen, for whoever asks."""

    def __init__(self):
        super().__init__()
        self.query, self.norm = layers.Dense(1), layers.BatchNormalization()
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


@program(
    "tensors that layers keep",
    lambda: vectors() | {"x": vectors()["x"][:, None] * np.eye(6)},
    run="slow",
)
class Attentive(CustomStep):
    """Reads what its attention has kept, and what its own call has."""

    def __init__(self):
        attention = Attention()
        super().__init__(keras.Sequential([keras.Input((6, 6)), attention, layers.Dense(3)]))
        self.attention = attention

    def call(self, x, training=False):
        logits = self.net(x, training=training)
        self.last_loss = 0.01 * ops.mean(ops.square(logits))
        return logits

    def step_loss(self, x, y):
        loss = super().step_loss(x, y) + self.last_loss
        return loss + 0.1 * self.attention.found["entropy"] + sum(self.attention.history)


@program("a step and a call of functions", run="slow")
class OfFunctions(CustomStep):
    """Is a `tf.function`, and so is what it calls, as in old examples."""

    def __init__(self):
        norm, dropout = layers.BatchNormalization(), layers.Dropout(0.3, seed=1)
        super().__init__(keras.Sequential([network(8), norm, dropout, layers.Dense(3)]))

    @tf.function
    def call(self, x, training=False):
        return self.net(x, training=training)

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_loss(y, self(x, training=True))
            if loss > 1.0:
                loss = loss * 0.5
        self.update(tape, loss)
        return {"loss": loss}


@program("variables of TensorFlow")
class OfVariables(CustomStep):
    """Trains variables of TensorFlow, beside those of a layer."""

    def __init__(self):
        super().__init__(network(inputs=3))
        start = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
        self.kernel = tf.Variable(start, name="kernel")

    def call(self, x, training=False):
        return self.net(tf.nn.relu(x @ self.kernel), training=training)

    def update(self, tape, loss):
        super().update(tape, loss, [self.kernel, *self.net.trainable_variables])


# Layers.


class Whitening(layers.Layer):
    """Computes batch statistics by hand."""

    def call(self, x):
        return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


class Capacity(layers.Layer):
    """Two experts, each of which takes the first few examples that want it."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = layers.Dense(2), [layers.Dense(4), layers.Dense(4)]

    def call(self, x):
        member = ops.one_hot(ops.argmax(self.gate(x), axis=-1), 2)
        positions = ops.cumsum(member, axis=0) * member
        member = member * ops.cast(positions <= 3.0, "float32")
        return sum(member[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Surprised(layers.Layer):
    """Scales all that it gets when one entry of it is large."""

    def call(self, x):
        return x * ops.where(ops.max(ops.abs(x)) > 2.5, 0.5, 1.0)


class NoiseForAll(layers.Layer):
    """Adds the same numbers to every example: as many as each has entries, and a batch examples."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal((6,), seed=self.seeds)


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
def with_clipped_gradient(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.5)


class Clipping(layers.Layer):
    def call(self, x):
        return with_clipped_gradient(x)


def one_large_at_the_end():
    data = vectors()
    data["x"] = np.clip(data["x"], -2.0, 2.0)
    data["x"][15, 1] = 3.0
    return data


def batches_of_six():
    x, y, _ = vectors().values()
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(6, drop_remainder=True)}


def large_errors_later():
    data = small_at_first(0.003)
    y = 3 * np.random.default_rng(2).normal(size=(17, 3)).astype("float32")
    y[:7] *= 0.003
    return data | {"y": y}


_hidden = lambda: layers.Dense(6, activation="tanh")  # noqa: E731
LAYERS = {
    "batch statistics by hand": (classifier(_hidden, Whitening), vectors),
    "experts of a constant capacity": (classifier(Capacity), vectors),
    "a layer that is surprised, and one that does nothing": (
        classifier(Surprised, layers.Identity),
        one_large_at_the_end,
    ),
    "the same noise for all": (classifier(NoiseForAll), batches_of_six),
    "a loop to a tolerance": (classifier(Equilibrium), lambda: small_at_first(1e-4)),
    "a gradient of its own": (
        classifier(lambda: layers.Dense(3), Clipping, loss="mse"),
        large_errors_later,
    ),
}
for _name, (_build, _data) in LAYERS.items():
    on_tensorflow(_name, _build, _data, run="slow")


# Examples of different lengths: texts, ragged and sparse tensors.

WORDS = [f"w{i}" for i in range(12)]
LENGTHS = [4] * 7 + [2, 7, 3, 4, 1, 5, 6, 2, 8, 3]


def texts():
    random = np.random.default_rng(0)
    return vectors() | {"x": tf.constant([" ".join(random.choice(WORDS, n)) for n in LENGTHS])}


def classify_texts():
    words = keras.Input((), dtype="string")
    tokens = layers.TextVectorization(vocabulary=WORDS)(words)  # pads to the longest
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(14, 5)(tokens))
    return compile_model(keras.Model(words, layers.Dense(3)(pooled)), loss=mean_loss)


on_tensorflow("texts padded to the longest", classify_texts, texts, run="slow")


def ragged():
    tokens = np.random.default_rng(0).integers(1, 14, sum(LENGTHS))
    x = tf.RaggedTensor.from_row_lengths(tokens, LENGTHS)
    return {"x": tf.data.Dataset.from_tensor_slices((x, vectors()["y"])).batch(7)}


@program("a mean over ragged tokens", ragged, run="slow")
class OfTokens(CustomStep):
    def __init__(self):
        embedding = layers.Embedding(14, 4)
        super().__init__(keras.Sequential([keras.Input(()), embedding, layers.Dense(14)]))

    def step_loss(self, x, y):  # noqa: ARG002  # predicts the tokens themselves
        return mean_loss(x.flat_values, self.net(x.flat_values))


@program("ragged tokens that the model pads", ragged, loss=mean_loss, metrics=["accuracy"])
class Bag(keras.Model):
    """Is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.classify = layers.Embedding(14, 4), layers.Dense(3)

    def call(self, x):
        return self.classify(ops.mean(self.embedding(x.to_tensor()), axis=1))


def sparse():
    random = np.random.default_rng(0)
    dense = np.zeros((17, 6), "float32")
    for row, count in enumerate([3] * 7 + [1, 6, 2, 5, 1, 4, 2, 6, 1, 3]):
        dense[row, random.choice(6, count, replace=False)] = random.normal(size=count) + 3
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), vectors()["y"]))
    return {"x": dataset.batch(7)}


@program("a mean over sparse ratings", sparse)
class OfRatings(CustomStep):
    def __init__(self):
        inputs = keras.Input((6,), sparse=True)
        super().__init__(keras.Sequential([inputs, layers.Dense(3), layers.Dense(6)]))

    def step_loss(self, x, y):  # noqa: ARG002  # predicts the ratings themselves
        predicted = tf.gather_nd(self.net(x), x.indices)
        return tf.reduce_mean((predicted - tf.cast(x.values, predicted.dtype)) ** 2)
