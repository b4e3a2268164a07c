"""A step runs once for each trace, and does what it does on one device, whatever that is."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.eager import context

from kdpkit import strategies
from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(21, 6)).astype("float32")
Y = RANDOM.normal(size=(21, 3)).astype("float32")


class Stepping(keras.Model):
    """Two layers, and a step that computes its loss by a method."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(8, "tanh"), layers.Dense(3)
        self.traces = 0
        self.prepare()

    def prepare(self):
        """Make what the step uses besides."""

    def build(self, shape):
        self.body.build(shape)
        self.head.build((None, 8))
        self.build_others()
        self.built = True

    def build_others(self):
        """Build what the step uses besides."""

    def call(self, x, training=None):  # noqa: ARG002  # Keras'
        return self.head(self.body(x))

    def loss_of(self, x, y):
        return tf.reduce_mean((self(x, training=True) - y) ** 2)

    def train_step(self, data):
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"step": loss}


class Counting(Stepping):
    """Counts its traces in Python."""

    def loss_of(self, x, y):
        return float(self.traces) * super().loss_of(x, y)


class Drawing(Stepping):
    """Draws with a generator, with TensorFlow's functions, and by NumPy."""

    def prepare(self):
        self.generator = tf.random.Generator.from_seed(3)

    def loss_of(self, x, y):
        noise = self.generator.normal(tf.shape(y)) + tf.random.normal(tf.shape(y))
        return super().loss_of(x, y + 0.1 * noise) * float(np.random.rand())


class Penalized(Stepping):
    """Adds the gradient's gradient, through batch statistics."""

    def prepare(self):
        self.norm = layers.BatchNormalization()

    def build_others(self):
        self.norm.build((None, 8))

    def call(self, x, training=None):
        return self.head(self.norm(self.body(x), training=training))

    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            predicted = self(x, training=True)
        slope = tape.gradient(predicted, x)
        return tf.reduce_mean((predicted - y) ** 2) + 0.2 * tf.reduce_mean(slope**2)


class Looping(Stepping):
    """Calls a layer in a loop and in a condition."""

    def loss_of(self, x, y):
        def again(index, h):
            return index + 1, self.body(h[:, :6]) + 0.1

        shapes = tf.TensorShape([]), tf.TensorShape([None, 8])
        padded = tf.pad(x, [[0, 0], [0, 2]])
        _, h = tf.while_loop(lambda index, _: index < 3, again, (0, padded), shapes)
        is_positive = tf.reduce_sum(h) > 0
        h = tf.cond(is_positive, lambda: self.head(h), lambda: self.head(2.0 * h))
        return tf.reduce_mean((h - y) ** 2)


class Walking(Stepping):
    """Takes gradients of a graph, of an intermediate tensor that is used in arithmetic."""

    def loss_of(self, x, y):
        h = self.body(x)
        predicted = self.head(tf.nn.softplus(h) * h)
        (slope,) = tf.gradients(tf.reduce_sum(predicted), [h])
        return tf.reduce_mean((predicted - y) ** 2) + tf.reduce_mean(slope**2)


class Recomputing(Stepping):
    """Has gradients of its own, and recomputes."""

    def loss_of(self, x, y):
        @tf.custom_gradient
        def halved(x):
            def gradient(upstream, variables=None):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    again = self.body(x)
                sources = [x, *variables]
                of_x, *of_weights = tape.gradient(again, sources, output_gradients=upstream)
                return 0.5 * of_x, [0.5 * of for of in of_weights]

            return self.body(x), gradient

        h = halved(x) + tf.recompute_grad(lambda x: self.body(x))(x)
        return tf.reduce_mean((self.head(h) - y) ** 2)


class Decorrelate(keras.regularizers.Regularizer):
    def __call__(self, a):
        return 5.0 * ops.square(ops.mean(a)) + ops.var(a)


class Regularized(Stepping):
    """Calls a layer twice whose regularizer compares examples."""

    def prepare(self):
        self.head = layers.Dense(3, activity_regularizer=Decorrelate())

    def loss_of(self, x, y):
        loss = super().loss_of(x, y) + sum(self.head.losses)
        again = self.head(tf.stack([self.body(x), 2.0 * self.body(x)], 1))
        return loss + sum(self.head.losses) + ops.mean(again**2)


class Pair(layers.Layer):
    """Computes two tensors alike."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, a, b):
        return self.dense(a), self.dense(b)


class OtherLengths(Stepping):
    """Gives a layer some of the examples beside all of them."""

    def prepare(self):
        self.pair = Pair()

    def build_others(self):
        self.pair.build((None, 8))

    def loss_of(self, x, y):
        h = self.body(x)
        some, of_all = self.pair(tf.boolean_mask(h, h[:, 0] > 0), h)
        return tf.reduce_mean(some**2) + tf.reduce_mean((of_all + self.head(h) - y) ** 2)


class SizeOfOutputs(Stepping):
    """Takes the number of examples from an output, as contrastive losses do."""

    def loss_of(self, x, y):
        h = self.body(x)
        size = h.shape[0] or tf.shape(h)[0]
        scores = tf.matmul(h, h, transpose_b=True)
        labels = tf.one_hot(tf.range(size), size)
        contrast = tf.nn.softmax_cross_entropy_with_logits(labels, scores)
        return super().loss_of(x, y) + tf.reduce_mean(contrast)


class PartsOfTheModel(Stepping):
    """Trains a layer that `call` does not use, and not all that it uses."""

    def prepare(self):
        self.decoder = keras.Sequential([layers.Dense(6)])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self(data[0])) - data[0]) ** 2)
        weights = self.decoder.trainable_variables + self.body.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"step": loss}


STEPS = (
    *(Counting, Drawing, Penalized, Looping, Walking, Recomputing, Regularized),
    *(OtherLengths, SizeOfOutputs, PartsOfTheModel),
)


def compiled(make):
    """Build and compile a model; one whose variables the first trace makes is traced twice."""
    model = make()
    model.build((None, 6))
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    if make not in (PartsOfTheModel, Autoencoder):
        model.optimizer.build(model.trainable_variables)
    return model


def trained(make, replicas, *, static=False):
    keras.utils.set_random_seed(0)
    model = None if replicas else compiled(make)
    if replicas:
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            model = replica_exact(compiled(make))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=static)
    history = model.fit(data, epochs=2, verbose=0, validation_data=(X[:5], Y[:5])).history
    return model, history


@pytest.mark.parametrize(
    "static", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["uneven", "static"]
)
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_step_does_what_it_does_on_one_device(make, static):
    one, known = trained(make, None, static=static)
    many, found = trained(make, 3, static=static)
    for name, values in known.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=1e-6, err_msg=name)
    for weight, other in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(other, weight, atol=2e-6)


class Autoencoder(keras.Model):
    """Adds a loss in `call`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(3), layers.Dense(3)

    def build(self, shape):
        self.encoder.build(shape)
        self.decoder.build((None, 3))
        self.built = True

    def call(self, x):
        z = self.encoder(x)
        self.add_loss(0.1 * ops.mean(ops.square(z)) + ops.square(ops.mean(z)))
        return self.decoder(z)


def test_a_model_that_adds_a_loss_trains_is_validated_and_predicts():
    one, known = trained(Autoencoder, None)
    many, found = trained(Autoencoder, 3)
    for name, values in known.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    assert many.evaluate(X, Y, verbose=0) == pytest.approx(one.evaluate(X, Y, verbose=0), rel=1e-5)
    predicted = many.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, one.predict(X, verbose=0), atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 8])
def test_a_step_is_traced_as_often_as_on_one_device(replicas):
    counts = []
    for count in (1, replicas):
        with strategies.select_strategy("mirrored", devices=count).scope():
            model = replica_exact(Stepping())
            model.build((None, 6))
            model.compile("sgd")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        model.fit(data, epochs=2, verbose=0)
        counts.append(model.traces)
    assert counts[1] == counts[0] >= 1


def products_by_device(fit):
    """Count the matrix products and convolutions of a step's graph, by device."""
    before = {*context.context().list_function_names()}
    fit()
    new = {*context.context().list_function_names()} - before
    steps = [name for name in new if "one_step_on_data" in str(name)]
    definition = max(
        map(context.context().get_function_def, steps), key=lambda of: len(of.node_def)
    )
    nodes = {node.name: node for node in definition.node_def}
    waiting = [*definition.ret.values(), *definition.control_ret.values()]
    used = set()
    while waiting:
        name = waiting.pop().lstrip("^").split(":")[0]
        if name in nodes and name not in used:
            used.add(name)
            waiting += nodes[name].input
    kinds = ("MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    heavy = [nodes[name] for name in used if nodes[name].op in kinds]
    return collections.Counter((node.device or "none").rpartition("/")[2] for node in heavy)


class Block(layers.Layer):
    """A residual block with statistics, as everybody writes it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()

    def build(self, shape):
        self.conv.build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        return x + ops.relu(self.norm(self.conv(x), training=training))


class Residual(Stepping):
    def prepare(self):
        self.blocks = [Block(), Block()]

    def build(self, shape):
        for block in self.blocks:
            block.build((None, 3, 3, 4))
        super().build((*shape[:-1], 4))

    def call(self, x, training=None):
        h = ops.reshape(ops.tile(x, (1, 6)), (-1, 3, 3, 4))
        for block in self.blocks:
            h = block(h, training=training)
        return self.head(self.body(ops.mean(h, axis=(1, 2))))


@pytest.mark.parametrize("make", [Stepping, Penalized, Residual], ids=lambda make: make.__name__)
def test_every_device_computes_its_share_of_both_passes(make):
    with strategies.select_strategy("mirrored", devices=3).scope():
        model = replica_exact(make())
        model.compile("sgd", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    found = products_by_device(lambda: model.fit(data, verbose=0))
    assert len(found) == 3
    assert max(found.values()) <= 1.1 * min(found.values()), found


def test_a_layer_of_keras_on_tensors_of_other_lengths_is_one_sentence():
    class Adding(Stepping):
        def prepare(self):
            self.add = layers.Add()

        def loss_of(self, x, y):
            return tf.reduce_mean(self.add([x, y]) ** 2) + tf.reduce_mean(self(x) ** 2)

    spec = tf.TensorSpec([None, 6])
    batches = [(X[:4], X[4:8]), (X[:4], X[:1])]
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=(spec, spec))
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = replica_exact(compiled(Adding))
    model.fit(data.take(1), verbose=0)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"different numbers of examples.*undivided=\[layer\]"):
        model.fit(data.skip(1), verbose=0)
    for weight, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(other, weight)
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = compiled(Adding)
        model = replica_exact(model, undivided=[model.add])
    model.fit(data, verbose=0)
