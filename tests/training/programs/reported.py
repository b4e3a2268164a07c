"""Programs that readers wrote to fool the engine: each was once wrong on replicas, or failed."""

import functools
import types

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training import programs
from tests.training.programs import (
    CustomStep,
    classifier,
    compile_model,
    cross_entropies,
    mean_loss,
    network,
    numbers,
    sgd,
    sparse_cross_entropy,
    vectors,
)
from tests.training.programs.steps import TwoLayers

on_tensorflow = functools.partial(programs.on_tensorflow, run="slow")
program = functools.partial(programs.program, run="slow")


def regression(loss="mse", **settings):
    """Return a function that builds a model of one number, with the loss that a function makes."""
    return lambda: compile_model(network(1), loss=loss() if callable(loss) else loss, **settings)


class TwoParts(TwoLayers):
    """A classifier whose features and whose last layer are apart."""

    def step_loss(self, x, y):
        return mean_loss(y, self(x))


# Losses and metrics.


def confidence(_, y_pred):
    return ops.mean(ops.max(y_pred, -1))


@on_tensorflow("softmax called logits, and a metric of one's own", run="quick")
def softmax_called_logits():
    model = keras.Sequential([network(5), layers.Dense(3, "softmax")])
    return compile_model(model, loss=sparse_cross_entropy(), metrics=[confidence])


@on_tensorflow(
    "softmax of large features, compiled by XLA",
    data=lambda: vectors() | {"x": 60 * vectors()["x"]},
)
def softmax_of_large_features():
    model = keras.Sequential([layers.Dense(5, "relu"), layers.Dense(3, "softmax")])
    loss, optimizer = keras.losses.SparseCategoricalCrossentropy(), keras.optimizers.SGD(0.01)
    return compile_model(model, optimizer, loss, metrics=[confidence], jit_compile=True)


on_tensorflow(
    "a loss of Keras that is a function",
    regression(lambda: keras.losses.mean_squared_error),
    numbers,
    run="quick",
)


@functools.wraps(keras.losses.sparse_categorical_crossentropy)
def hardest(labels, logits):
    losses = cross_entropies(labels, logits)
    return ops.where(losses >= ops.mean(losses), losses, 0.0)


on_tensorflow("a loss that is called as Keras'", classifier(loss=hardest))


class NoisyLabels(keras.losses.Loss):
    """Returns one number for a batch, and draws for its examples."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, y_true, y_pred):
        noisy = y_true + 0.5 * keras.random.normal(ops.shape(y_true), seed=self.seed)
        return ops.mean(ops.square(noisy - y_pred))


class MovingNormalizer(keras.losses.Loss):
    """Keeps the number of positives in a variable, and divides by it."""

    def __init__(self):
        super().__init__()
        self.positives = tf.Variable(10.0, trainable=False)

    def call(self, y_true, y_pred):
        self.positives.assign(0.9 * self.positives + 0.1 * ops.sum(ops.cast(y_true > 0, "float32")))
        return ops.sum(ops.square(y_true - y_pred)) / self.positives


def critic_in_loss():
    """Return a loss that trains against a network with batch statistics."""
    critic = keras.Sequential(
        [keras.Input((1,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)]
    )

    def loss(y_true, y_pred):
        judged = ops.mean(ops.softplus(-critic(y_pred, training=True)))
        return judged + ops.mean(ops.square(y_true - y_pred))

    return loss


class Smallest(keras.metrics.Metric):
    """Keeps the smallest prediction: no sum."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_variable(shape=(), initializer="ones", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):  # noqa: ARG002  # Keras' arguments
        self.value.assign(ops.minimum(self.value, ops.min(y_pred)))

    def result(self):
        return self.value.value


on_tensorflow("a loss of one number that draws", regression(NoisyLabels), numbers)
on_tensorflow("a loss with a variable of TensorFlow", regression(MovingNormalizer), numbers)
on_tensorflow("a loss with a network of batch statistics", regression(critic_in_loss), numbers)
on_tensorflow("a metric that is no sum", lambda: regression(metrics=[Smallest()])(), numbers)
on_tensorflow("a metric that compares examples", regression(metrics=[keras.losses.dice]), numbers)
on_tensorflow(
    "a loss along the batch", regression(lambda: keras.losses.CosineSimilarity(axis=0)), numbers
)
on_tensorflow(
    "a metric along the batch",
    lambda: regression(metrics=[keras.metrics.CosineSimilarity(axis=0)])(),
    numbers,
)


@on_tensorflow(
    "the cosine of predictions of one axis", data=lambda: numbers() | {"y": numbers()["y"][:, 0]}
)
def cosine():
    x = keras.Input((6,))
    metrics = [keras.metrics.CosineSimilarity(), "mae"]
    loss = lambda y, predictions: ops.mean(ops.square(y - predictions))  # noqa: E731
    return compile_model(keras.Model(x, layers.Dense(1)(x)[:, 0]), loss=loss, metrics=metrics)


def weighted():
    weights = np.random.default_rng(2).uniform(size=(17, 5)).astype("float32")
    return numbers() | {"y": numbers()["y"][..., None], "sample_weight": weights}


@on_tensorflow("weights that have more axes than the losses", data=weighted)
def with_many_weights():
    return compile_model(keras.Sequential([network(1), layers.Reshape((1, 1))]), loss="mse")


@program("a loss of Keras on one axis")
class OfRankOne(CustomStep):
    def step_loss(self, x, y):
        predictions = tf.reduce_sum(self(x), axis=1)
        return keras.losses.MeanSquaredError()(tf.cast(y, predictions.dtype), predictions)


@program("a metric that is reset, and one that is read")
class BatchAccuracy(CustomStep):
    """Weighs the loss by the accuracy of the batch, and by that of all before."""

    def __init__(self):
        super().__init__()
        self.of_batch = keras.metrics.SparseCategoricalAccuracy()
        self.of_all = keras.metrics.SparseCategoricalAccuracy()

    def step_loss(self, x, y):
        logits = self(x)
        self.of_batch.reset_state()
        for metric in (self.of_batch, self.of_all):
            metric.update_state(y, logits)
        weight = 2.0 - self.of_batch.result() - 0.5 * self.of_all.total / self.of_all.count
        return weight * mean_loss(y, logits)


@program("numbers of metrics read and set by hand")
class MetricsByHand(TwoParts):
    """Reads, halves and adds to the numbers of its metrics."""

    def prepare(self):
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.average = keras.metrics.Mean()
        self.largest, self.used = keras.metrics.Mean(), keras.metrics.Sum()

    def step_loss(self, x, y):
        accuracy, average, logits = self.accuracy, self.average, self(x)
        for number in (accuracy.total, accuracy.count):
            number.assign(0.5 * number)
        loss = mean_loss(y, logits) * (1.0 + accuracy.total / (accuracy.count + 1.0))
        accuracy.update_state(y, logits, sample_weight=0.5)
        self.used.update_state(self.body(x), sample_weight=0.5)
        self.largest.update_state(self.body(x), sample_weight=ops.cast(ops.shape(y)[0], "float32"))
        average.total.assign_add(loss)
        average.count.assign_add(1.0)
        return loss

    def train_step(self, data):
        super().train_step(data)
        counted = (self.accuracy, self.average, self.largest, self.used)
        return {str(number): metric.result() for number, metric in enumerate(counted)}


@program("a metric of a plain object")
class Tracking(CustomStep):
    """Counts examples in a metric that a plain object has, and in a variable that adds up."""

    def __init__(self):
        super().__init__()
        self.tracker = types.SimpleNamespace(seen=keras.metrics.Sum())
        self.count = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def step_loss(self, x, y):
        self.tracker.seen.update_state(tf.ones(tf.shape(x)[0]))
        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return super().step_loss(x, y) * (1.0 + 0.01 * self.tracker.seen.result())

    def train_step(self, data):
        return super().train_step(data) | {"seen": self.tracker.seen.result()}


# Layers, and what is called in them.


@program("a softmax over the bag")
class BagAttention(TwoParts):
    """Weighs the examples by a softmax over the batch."""

    def prepare(self):
        self.score, self.softmax = layers.Dense(1), layers.Activation("softmax")
        self.score.build((None, 8))

    def step_loss(self, x, y):
        features = self.body(x)
        weights = self.softmax(self.score(features)[:, 0])
        pooled = ops.sum(weights[:, None] * features, axis=0, keepdims=True)
        return mean_loss(y, self.net(features)) + ops.mean(ops.square(self.net(pooled)))


@program("outputs kept by name")
class Endpoints(TwoParts):
    """Keeps its layers' outputs, by name, for the loss."""

    def call(self, x, training=None):  # noqa: ARG002  # Keras' arguments
        features = self.body(x)
        self.endpoints = [("features", features), ("none", None)]
        return self.net(features)

    def step_loss(self, x, y):
        loss = super().step_loss(x, y)
        (_, features), _ = self.endpoints
        return loss + ops.mean(ops.square(features - ops.mean(features, axis=0)))


FEATURES = []


class Tap(layers.Layer):
    """Leaves what it is called on in a list of this module."""

    def call(self, x):
        FEATURES.append(x)
        return x + 0.0


@program("a cell with dropout, step by step")
class CellsByHand(TwoParts):
    """Calls a recurrent cell with dropout step by step, as a decoder with attention does."""

    def prepare(self):
        self.cell = layers.GRUCell(8, dropout=0.4, recurrent_dropout=0.2, seed=3)
        self.cell.build((None, 3))

    def step_loss(self, x, y):
        self.cell.reset_dropout_mask()
        self.cell.reset_recurrent_dropout_mask()
        state = self.body(x)
        for part in (x[:, :3], x[:, 3:]):
            _, (state,) = self.cell(part, [state], training=True)
        return mean_loss(y, self.net(state))


@program(
    "a table looked up in a layer and outside",
    lambda: {"x": np.random.default_rng(0).integers(0, 6, (17, 2)), "batch_size": 7},
    optimizer=lambda: keras.optimizers.Adam(0.05, epsilon=1e-2),
)
class SkipGram(CustomStep):
    def __init__(self):
        super().__init__(layers.Embedding(6, 4))
        self.net.build()

    def train_step(self, data):
        return super().train_step((data[:, 0], data[:, 1]))

    def step_loss(self, word, context):
        near = ops.sum(self.net(word) * ops.take(self.net.embeddings, context, axis=0), -1)
        return ops.mean(ops.softplus(-near))


@program("a histogram of the batch")
class Histogram(CustomStep):
    """Weighs the loss by how often the labels are in the batch."""

    def __init__(self):
        super().__init__()
        self.counts = layers.CategoryEncoding(3, output_mode="count")

    def step_loss(self, x, y):
        often = self.counts(y)
        return ops.sum(cross_entropies(y, self(x)) / (1.0 + ops.take(often, y)))


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


@program("a flag that the step switches")
class SwitchesFlag(TwoParts):
    """Calls a layer twice, and moves its center once."""

    def prepare(self):
        self.centered = Toggled()
        self.centered.build((None, 8))

    def step_loss(self, x, y):
        self.centered.moves = True
        features = self.centered(self.body(x))
        self.centered.moves = False
        again = self.centered(self.body(x * 1.1))
        return mean_loss(y, self.net(features)) + ops.mean(ops.square(features - again))


class Centered(layers.Layer):
    """Looks at all examples in training."""

    def call(self, x, training=False):
        return x - ops.mean(x, axis=0) if training else x


class AroundCentered(layers.Layer):
    """Looks at all examples, and has a layer that learns from its call that it is trained."""

    def __init__(self):
        super().__init__()
        self.centered, self.dense = Centered(), layers.Dense(3)

    def call(self, x):
        return self.centered(self.dense(x - 0.1 * ops.mean(x, axis=0)))


class EvaluatedFirst(keras.Sequential):
    def fit(self, x, y, batch_size, **settings):
        self.evaluate(x, y, batch_size=batch_size, verbose=0)
        return super().fit(x, y, batch_size=batch_size, **settings)


class Mixed(layers.Layer):
    """Looks at all examples if its caller says so."""

    def call(self, x, mix=False):
        return x + x[::-1] if mix else x * 1.0


@program("one layer in two modes", run="quick")
class TwoModes(CustomStep):
    def __init__(self):
        super().__init__()
        self.mixed = Mixed()

    def call(self, x, training=False):  # noqa: ARG002  # Keras' arguments
        return self.net(self.mixed(x)) + self.net(self.mixed(x, mix=True))


class Phased(layers.Layer):
    """Looks at all examples once a callback has begun the next phase."""

    def build(self, shape):
        self.phase = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        super().build(shape)

    def call(self, x):
        return ops.where(self.phase > 0, x - ops.mean(x, axis=0), x)


class NextPhase(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras' arguments
        self.model.layers[0].phase.assign(epoch)


class Edges(layers.Layer):
    """Convolves with a constant that it makes when it is made."""

    def __init__(self):
        super().__init__()
        self.kernel = tf.constant(np.ones((3, 1, 2), "float32") / 3)

    def call(self, x):
        return tf.nn.conv1d(x[..., None], self.kernel, stride=1, padding="SAME")


def shifted(by_all):
    def shift(x):
        return x - ops.mean(x, axis=0) if by_all else x * 1.0

    return shift


def with_activation(by_all):
    return lambda: layers.Dense(8, activation=shifted(by_all))


def written_by_exec():
    names = {"keras": keras}
    exec("class Own(keras.Layer):\n def call(self, x): return x - keras.ops.mean(x, 0)", names)
    return names["Own"]()


def attending_to_the_batch():
    inputs = keras.Input((6,))
    x = layers.Reshape((2, 1, 3))(inputs)
    x = layers.MultiHeadAttention(2, 4, attention_axes=0)(x, x)
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
    return compile_model(model, loss=mean_loss)


def attending_across_examples():
    """Keras' attention to a tensor of two axes is between the examples."""
    inputs = keras.Input((6,))
    x = layers.Dense(6)(inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.Attention()([x, x])))
    return compile_model(model, loss=mean_loss)


def regularized():
    orthogonal = keras.regularizers.OrthogonalRegularizer(0.1, mode="columns")
    return layers.Dense(8, activity_regularizer=orthogonal)


STACKS = {
    "tensors left in a list": [Tap],
    "a softmax over the examples": [lambda: layers.Softmax(axis=-2)],
    "functions that have one name": [
        lambda: layers.Lambda(shifted(False)),
        lambda: layers.Lambda(shifted(True)),
    ],
    "activations that have one name": [with_activation(False), with_activation(True)],
    "outputs that are kept orthogonal": [regularized],
    "a layer without a module": [written_by_exec],
    "layers of two types": [lambda: layers.Dense(8, dtype="float64")],
    "a mode of the call around": [AroundCentered],
    "halves of a batch normalized apart": [lambda: layers.Dense(8), GhostNormalization],
    "a constant that a layer has made": [Edges, layers.Flatten],
    "a recurrent layer, compiled by XLA": [lambda: layers.Reshape((3, 2)), lambda: layers.LSTM(4)],
}
for _name, _layers in STACKS.items():
    on_tensorflow(_name, classifier(*_layers, jit_compile="XLA" in _name))
on_tensorflow("attention over the batch", attending_to_the_batch)
on_tensorflow("attention of two axes", attending_across_examples)
on_tensorflow(
    "a phase of a callback", classifier(Phased), lambda: vectors() | {"callbacks": [NextPhase()]}
)
on_tensorflow(
    "a verdict of evaluate",
    lambda: compile_model(EvaluatedFirst([Centered(), layers.Dense(3)]), loss=mean_loss),
    run="quick",
)


# Steps.


@program("a critic that is frozen in the step")
class FrozenCritic(TwoParts):
    """Trains the head and clips it, then freezes it and trains what is below against it."""

    def prepare(self):
        self.critic_optimizer = sgd()

    def train_step(self, data):
        self.net.trainable = True
        with tf.GradientTape() as tape:
            loss = self.step_loss(*data)
        self.update(tape, loss, self.net.trainable_weights, self.critic_optimizer)
        for weight in self.net.trainable_weights:
            weight.assign(ops.clip(weight, -0.3, 0.3))
        self.net.trainable = False
        with tf.GradientTape() as tape:
            loss = -ops.mean(self(data[0]))
        self.update(tape, loss)
        return {"loss": loss}


def unlabeled_and_labeled():
    """Return batches of unlabeled examples, beside fewer labeled ones."""
    x, slices = vectors()["x"], tf.data.Dataset.from_tensor_slices
    both = slices(x[:16]).batch(4), slices((x[:12], x[:12, :3] * x[:12, 3:])).batch(3)
    return {"x": tf.data.Dataset.zip(both)}


@program("labeled examples cut elsewhere", unlabeled_and_labeled)
class SemiSupervised(CustomStep):
    def __init__(self):
        super().__init__()
        self.loss_of_labeled = keras.losses.MeanSquaredError()

    def step_loss(self, unlabeled, labeled):
        x, y = labeled
        supervised = self.loss_of_labeled(y, self(x + 0.05))
        return supervised + 0.1 * ops.mean(ops.square(self(unlabeled)))


@program("gradient by the number of examples")
class BySize(CustomStep):
    """Sets the rate, and leaves gradients out, by how many examples a batch has."""

    def train_step(self, data):
        is_full = ops.shape(data[0])[0] >= 7
        with tf.GradientTape() as tape:
            loss = self.step_loss(*data)
            loss *= tf.where(ops.sum(ops.ones_like(data[0][:, 0])) < 6.0, 0.1, 1.0)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [g * tf.where(is_full, 1.0, 0.5) for g in gradients]
        self.optimizer.learning_rate.assign(tf.where(is_full, 0.1, 0.01))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Block(layers.Layer):
    """Builds its layers when it is called."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=1)
        self.dense = layers.Dense(3)

    def call(self, x, training=False):
        return self.dense(self.attention(x, x, training=training))


def sequences():
    x = np.random.default_rng(0).normal(size=(17, 5, 3)).astype("float32")
    return {"x": x, "y": np.flip(x, 1).copy(), "batch_size": 7}


@program("layers that a step builds", sequences)
class Unbuilt(keras.Model):
    """Has layers that its step is the first to call, and no `call` of its own."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.block(x, training=True) - y) ** 2)
        weights = self.block.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@program("a gradient between layers")
class Saliency(TwoParts):
    """Takes the gradient of what a layer returns by what a layer before it returned."""

    def step_loss(self, x, y):
        features = self.body(x)
        with tf.GradientTape() as inner:
            inner.watch(features)
            scores = self.net(features)
        used = features * ops.max(ops.abs(inner.gradient(scores, features)), axis=0)
        return mean_loss(y, scores + self.net(used))


@program("an inner step", run="quick")
class InnerStep(CustomStep):
    """Learns to learn: the outer gradient flows through weights of an inner step."""

    def __init__(self):
        super().__init__()
        self.build((None, 6))

    def step_loss(self, x, y):
        others = [variable.value for variable in self.non_trainable_variables]
        fast = [tf.convert_to_tensor(variable) for variable in self.trainable_variables]
        with tf.GradientTape() as inner:
            inner.watch(fast)
            logits, _ = self.stateless_call(fast, others, x)
            loss = mean_loss(y, logits)
        gradients = inner.gradient(loss, fast)
        fast = [w - 0.5 * tf.tanh(10.0 * g) for w, g in zip(fast, gradients, strict=True)]
        return mean_loss(y, self.stateless_call(fast, others, x)[0])


class ScaledStep(CustomStep):
    """Scales its loss by a function of the model and of the examples."""

    def __init__(self, scale, make=lambda: None):
        super().__init__()
        self.scale, self.held = scale, make()

    def step_loss(self, x, y):
        return self.scale(self, x) * super().step_loss(x, y)


def scaled(name, *arguments, **settings):
    on_tensorflow(name, lambda: compile_model(ScaledStep(*arguments), **settings))


def drawn_by_python(_, x):
    """Draw in a function of Python, and take a gradient through it."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        drawn = tf.py_function(lambda v: tf.reduce_mean(v) * np.random.rand(), [x], tf.float32)
    return tf.ensure_shape(drawn, []) + tf.reduce_sum(tape.gradient(drawn, x))


def drawn_by_numpy(*_):
    return float(np.random.beta(0.4, 0.4))  # as mixup is written


def summed_over_replicas(_, x):
    """Add up over replicas, as loops of TensorFlow's guides do."""
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_mean(x**2))


def outside_of_the_scope():
    with tf.init_scope():
        return tf.Variable(1.0)


scaled("numbers of NumPy, eagerly", drawn_by_numpy, run_eagerly=True)
scaled("numbers that a function of Python draws", drawn_by_python)
scaled(
    "a loss that counts by step", lambda model, _: ops.cast(model.optimizer.iterations, "float32")
)
scaled("what replicas add up", summed_over_replicas)
scaled(
    "a variable of nobody's scope",
    lambda model, _: 1.0 / model.held[0].assign_add(1.0),
    lambda: (outside_of_the_scope(),),
)


@program("a variable that adds up")
class OwnVariables(CustomStep):
    """Counts its steps in a variable of Keras and in one of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(aggregation="sum", trainable=False)
        self.steps = tf.Variable(1.0)

    def step_loss(self, x, y):
        self.count.assign(self.count + 1.0)
        scale = 1.0 + ops.convert_to_tensor(self.count) / self.steps.assign_add(1.0)
        return scale * super().step_loss(x, y)


class Langevin(keras.optimizers.SGD):
    """Adds noise to each gradient."""

    def update_step(self, gradient, variable, learning_rate):
        noise = 0.1 * tf.random.normal(tf.shape(gradient))
        super().update_step(gradient + noise, variable, learning_rate)


on_tensorflow("an optimizer that draws", classifier(optimizer=lambda: Langevin(0.1)))


@program("an optimizer that is hidden")
class HiddenOptimizer(CustomStep):
    """Has its optimizer where nobody finds it before the step."""

    def __init__(self):
        super().__init__()
        hidden = sgd()
        self.get_optimizer = lambda: hidden

    def update(self, tape, loss):
        super().update(tape, loss, optimizer=self.get_optimizer())


# Callbacks that change what is trained.


class ChangesParts(keras.callbacks.Callback):
    """Sets another optimizer and another activation in a model that computes eagerly."""

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras' arguments
        if epoch == 1:
            self.model.optimizer = keras.optimizers.SGD(0.05)
            self.model.layers[0].activation = shifted(True)


class CompilesAgain(keras.callbacks.Callback):
    """Trains more layers, by another optimizer."""

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002  # Keras' arguments
        if epoch == 1:
            self.model.layers[0].trainable = True
            self.model.compile(keras.optimizers.SGD(0.05, momentum=0.9), mean_loss)
            self.model.make_train_function()


@on_tensorflow(
    "compiled once more in a callback", data=lambda: vectors() | {"callbacks": [CompilesAgain()]}
)
def frozen():
    model = network()
    model.layers[0].trainable = False
    return compile_model(model, loss=mean_loss)


on_tensorflow(
    "eager, and other parts later",
    classifier(lambda: layers.Dense(5, "tanh"), run_eagerly=True),
    lambda: vectors() | {"callbacks": [ChangesParts()]},
)
