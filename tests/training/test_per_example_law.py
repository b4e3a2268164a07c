"""Layers that break the law *each example is computed by itself*, and their twins that keep it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kdpkit.testing import laws
from kdpkit.training.tensorflow import _patches, _per_example_law
from kdpkit.training.tensorflow._per_example_law import broken_law

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype("float32")
CHANGES_OUTPUTS, CHANGES_GRADIENTS = "changes the outputs", "changes the gradients"


class Function(layers.Layer):
    """A layer that calls a function on itself and its input, and has a weight and seeds."""

    def __init__(self, function, initial=0.0):
        super().__init__()
        self.function, self.initial = function, initial
        self.seeds = keras.random.SeedGenerator(3)
        self.kept, self.calls = {}, 0

    def build(self, shape):  # noqa: ARG002  # Keras' signature
        constant = keras.initializers.Constant(self.initial)
        self.weight = self.add_weight(shape=(), initializer=constant)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):  # noqa: ARG002  # what a layer is told
        self.calls += 1
        return self.function(self, x)


def _until_all_are_small(self, x):  # noqa: ARG001
    def halve(values):
        return ops.where(ops.abs(values) > 0.1, values / 2, values * 0.9)

    return tf.while_loop(
        lambda values: ops.any(ops.abs(values) > 0.1), lambda v: (halve(v),), (x,)
    )[0]


def _until_each_is_small(self, x):  # noqa: ARG001
    def halve(values):
        return ops.where(ops.abs(values) > 0.1, values / 2, values)

    return tf.while_loop(lambda i, _: i < 5, lambda i, v: (i + 1, halve(v)), (0, x))[1]


def _mixed_by_chance(self, x):
    is_mixed = keras.random.uniform((), seed=self.seeds) < 0.3
    return ops.where(is_mixed, (x + ops.flip(x, axis=0)) / 2, x)


def _scaled_as_images(_, x):
    return ops.cond(ops.min(x) >= 0, lambda: x / ops.max(x), lambda: x)


def _in_groups_of_six(_, x):
    def centered():
        groups = tf.reshape(x, (-1, 6, 5, 4))
        return tf.reshape(groups - tf.reduce_mean(groups, 1, keepdims=True), tf.shape(x))

    return tf.cond(tf.shape(x)[0] % 6 == 0, centered, lambda: x)


def _squeezed(_, x):
    return tf.cond(tf.shape(x)[0] == 1, lambda: 2 * x, lambda: x)


def _ranked_beside_masked(_, x):
    ranks = tf.cast(tf.argsort(tf.argsort(x, axis=0), axis=0), x.dtype)
    return ops.concatenate([ranks, ops.full_like(x, -1e9)], axis=-1)


def _with_gradient(gradient):
    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), gradient

    return lambda self, x: identity(x)  # noqa: ARG005


def _gradient_of_weight(gradient):
    @tf.custom_gradient
    def scaled(x, weight):
        return x * weight, lambda upstream: (upstream * weight, gradient(upstream * x))

    return lambda self, x: scaled(x, ops.convert_to_tensor(self.weight))


def _special(self, x):  # noqa: ARG001
    return x * ops.where(ops.arange(ops.shape(x)[0]) == 0, 2.0, 1.0)[:, None, None]


def _drawn_special(self, x):
    return _special(self, x) + keras.random.normal(ops.shape(x), seed=self.seeds)


def _keeping(self, x):
    self.kept["mean"] = ops.mean(x)
    return x


FEATURES = []


def _leaving(self, x):  # noqa: ARG001
    FEATURES.append(x)
    return x


def _mixed_by_a_negative_weight(self, x):
    return ops.where(self.weight < 0, x - ops.mean(x, axis=0), x)


def _at_least(upstream):
    return upstream * tf.maximum(1.0, 0.3 / (tf.norm(upstream) + 1e-6))


def _counting(self, x):
    self.count.assign_add(1.0)
    return x


def _penalizing(self, x):
    self.add_loss(ops.sum(x))
    return x


def _printing(self, x):  # noqa: ARG001
    tf.print("a line that nobody wants")
    return x


def _calling_python(self, x):  # noqa: ARG001
    return tf.ensure_shape(tf.numpy_function(lambda value: value * 2, [x], tf.float32), x.shape)


def _making(self, x):  # noqa: ARG001
    return layers.Dense(3)(x)


def _experts(self, x):  # noqa: ARG001
    first = ops.cast(ops.sum(x, axis=(1, 2)) > 0, "float32")
    is_taken = first * ops.cast(ops.cumsum(first) <= 3, "float32")
    return x * is_taken[:, None, None]


BREAKS = {
    "batch statistics": (lambda _, x: x - ops.mean(x, axis=0), CHANGES_OUTPUTS),
    "a loop until all are small": (_until_all_are_small, CHANGES_OUTPUTS),
    "scaled by the number of examples": (
        lambda _, x: x / tf.cast(tf.shape(x)[0], x.dtype),
        CHANGES_OUTPUTS,
    ),
    "the first is special, with noise": (_drawn_special, CHANGES_OUTPUTS),
    "mixed by chance": (_mixed_by_chance, "draws numbers that the examples share"),
    "scaled as images": (_scaled_as_images, CHANGES_GRADIENTS),
    "groups of six": (_in_groups_of_six, CHANGES_OUTPUTS),
    "another branch for one": (_squeezed, CHANGES_OUTPUTS),
    "ranked beside what is masked": (_ranked_beside_masked, CHANGES_OUTPUTS),
    "a capacity": (_experts, CHANGES_OUTPUTS),
    "mixed by a weight that is zero": (
        lambda self, x: x + self.weight * ops.mean(x, axis=0),
        CHANGES_OUTPUTS,
    ),
    "limited, when NaN is ignored": (
        lambda _, x: x * ops.where(ops.max(ops.where(ops.isnan(x), 0.0, x)) > 1e3, 0.5, 1.0),
        CHANGES_OUTPUTS,
    ),
    "its gradient is clipped by a norm": (
        _with_gradient(lambda upstream: tf.clip_by_norm(upstream, 0.5)),
        CHANGES_GRADIENTS,
    ),
    "its gradient has a least norm": (_with_gradient(_at_least), CHANGES_GRADIENTS),
    "mixed by a negative weight": (_mixed_by_a_negative_weight, CHANGES_OUTPUTS),
    "leaves a tensor in a list": (_leaving, "leaves a tensor outside of itself .`function"),
    "a weight's gradient is clipped": (
        _gradient_of_weight(lambda of_each: tf.clip_by_value(tf.reduce_sum(of_each), -0.1, 0.1)),
        "has a gradient that is no sum",
    ),
    "keeps a tensor": (_keeping, "keeps a tensor in an attribute, `kept`"),
    "assigns": (_counting, "assigns variables"),
    "adds a loss": (_penalizing, "adds a loss"),
    "prints": (_printing, "does more than compute each example .PrintV2"),
    "calls Python": (_calling_python, "does more than compute each example .*PyFunc"),
    "draws from TensorFlow's own state": (
        lambda _, x: x + tf.random.normal(tf.shape(x)),
        "does more than compute each example .Random",
    ),
    "makes variables": (_making, "cannot be tried alone .it makes variables"),
    "gives a number": (lambda _, x: ops.mean(x), "returns a single number"),
    "gives no examples": (
        lambda _, x: ops.ones((5, 4)) * x[0, 0, 0],
        "returns something without the examples",
    ),
    "adds to four examples": (
        lambda _, x: x + ops.zeros((4, 1, 1)),
        "fails on some made-up examples",
    ),
    "fails": (lambda _, x: x.numpy(), "cannot be tried alone"),
    "is never finite": (lambda _, x: x * np.nan, "cannot be tried on made-up examples"),
}
KEEPS = {
    "statistics of an example": lambda _, x: x - ops.mean(x, axis=1, keepdims=True),
    "a loop of a fixed length": _until_each_is_small,
    "scaled by the length": lambda _, x: x / tf.cast(tf.shape(x)[1], x.dtype),
    "noise for each example": lambda self, x: (
        x + keras.random.normal(ops.shape(x), seed=self.seeds)
    ),
    "dropout": lambda self, x: keras.random.dropout(x, 0.5, seed=self.seeds),
    "scaled by a weight that is zero": lambda self, x: x + self.weight * x,
    "its gradient is clipped by value": _with_gradient(lambda u: tf.clip_by_value(u, -0.1, 0.1)),
    "a weight's gradient of its own": _gradient_of_weight(tf.reduce_sum),
    "the logarithm": lambda _, x: ops.log(x),
    "several entries of an example": lambda _, x: ops.reshape(x, (-1, 4)),
    "asserts": lambda _, x: tf.debugging.assert_all_finite(x, "not finite"),
}


def _built(function, initial=0.0):
    layer = Function(function, initial)
    layer.build(X.shape)
    return layer


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_law_is_named(name):
    function, reason = BREAKS[name]
    with pytest.raises(AssertionError, match=f"`function.*` {reason}"):
        laws.per_example(_built(function), X)


@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_the_law_passes(name):
    laws.per_example(_built(KEEPS[name]), X)


# Fewer variants are tried of what gives many numbers.
LARGE = np.zeros((4, 600, 500), "float32")


@pytest.mark.parametrize("name", ["batch statistics", "a capacity", "mixed by a negative weight"])
def test_large_outputs_that_break_the_law_are_found(name):
    function, _ = BREAKS[name]
    with pytest.raises(AssertionError, match="`function.*` (changes|has a gradient)"):
        laws.per_example(_built(function), LARGE)


def test_large_outputs_that_keep_the_law_pass():
    laws.per_example(_built(KEEPS["noise for each example"]), LARGE)


def _state(layer):
    parts = [part for v in layer.variables for part in getattr(v.value, "values", [v.value])]
    return [part.numpy() for part in parts]


def _drawing_and_more(self, x):
    self.kept["shape"] = x.shape
    np.random.uniform()
    print("a line that nobody wants")  # noqa: T201  # as users do
    return keras.random.dropout(self.norm(x) * self.weight, 0.5, seed=self.seeds)


class Drawing(Function):
    def __init__(self):
        super().__init__(_drawing_and_more)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        super().build(shape)
        self.norm.build(shape)


def test_nothing_of_a_trial_is_seen_on_any_replica(capfd):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = Drawing()
        layer.build(X.shape)
    before, reasons = _state(layer), []
    np.random.seed(3)

    def replica():
        with tf.GradientTape() as tape:
            outputs = layer(tf.constant(X), training=True)
            with _patches.installed():
                reasons.append(broken_law(layer, (tf.constant(X),), {"training": True}))
            loss = tf.reduce_sum(outputs)
        return tape.gradient(loss, layer.weight.value)

    tf.function(lambda: strategy.run(replica), autograph=False).get_concrete_function()
    assert reasons == [None, None]
    assert layer.calls == 2
    assert layer.kept == {"shape": X.shape}
    assert not layer.losses
    assert capfd.readouterr().out.count("a line that nobody wants") == 2
    drawn = np.random.uniform()
    np.random.seed(3)
    assert np.random.uniform(size=3)[-1] == drawn
    for mine, its in zip(before, _state(layer), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_block_of_attention_keeps_it_though_the_gradient_of_its_key_bias_is_rounding():
    class Block(layers.Layer):
        def build(self, shape):
            self.attention = layers.MultiHeadAttention(2, 32)
            self.attention.build(shape, shape)
            self.norm = layers.LayerNormalization()
            self.norm.build(shape)
            self.drop = layers.Dropout(0.1)

        def call(self, x, training=False):
            attended = self.attention(x, x, use_causal_mask=True)
            return self.norm(x + self.drop(attended, training=training))

    block = Block()
    x = np.random.default_rng(0).normal(size=(4, 64, 64)).astype("float32")
    block(x)
    for seed in range(3):
        keras.utils.set_random_seed(seed)
        with _patches.installed():
            assert broken_law(block, (tf.constant(x),), {"training": True}) is None


def test_a_model_is_tried_as_a_layer_and_masks_belong_to_examples():
    model = keras.Sequential([layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3)])
    laws.per_example(model, np.ones((5, 7), "int32"))


def test_a_loop_that_never_ends_is_out(monkeypatch):
    monkeypatch.setattr(_per_example_law, "_SECONDS", 1.0)

    def until_small(self, x):  # noqa: ARG001
        return tf.while_loop(lambda v: ops.any(ops.abs(v) > 1), lambda v: (v - ops.sign(v),), (x,))[
            0
        ]

    with pytest.raises(AssertionError, match="for more than 1 s"):
        laws.per_example(_built(until_small), X)
