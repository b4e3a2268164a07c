"""Layers that break the law *each example is computed by itself*, and their twins that keep it."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kdpkit.testing import laws
from kdpkit.training.tensorflow import _layer_trial

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype("float32")


class Function(layers.Layer):
    """A layer that calls a function on itself and its input, and has a weight and seeds."""

    def __init__(self, function, initial=0.0):
        super().__init__()
        self.function, self.initial = function, initial
        self.seeds = keras.random.SeedGenerator(3)
        self.memory, self.calls = {}, 0
        self.generator = np.random.default_rng(3)

    def build(self, shape):  # noqa: ARG002  # Keras' signature
        constant = keras.initializers.Constant(self.initial)
        self.weight = self.add_weight(shape=(), initializer=constant)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):  # noqa: ARG002  # what a layer is told
        return self.function(self, x)


def _until_all_are_small(_, x):
    def halve(values):
        return ops.where(ops.abs(values) > 0.1, values / 2, values * 0.9)

    return tf.while_loop(
        lambda values: ops.any(ops.abs(values) > 0.1), lambda v: (halve(v),), (x,)
    )[0]


def _until_each_is_small(_, x):
    def halve(values):
        return ops.where(ops.abs(values) > 0.1, values / 2, values)

    return tf.while_loop(lambda i, _: i < 5, lambda i, v: (i + 1, halve(v)), (0, x))[1]


def _mixed_by_chance(self, x):
    is_mixed = keras.random.uniform((), seed=self.seeds) < 0.3
    return ops.where(is_mixed, (x + ops.flip(x, axis=0)) / 2, x)


def _in_groups_of_six(_, x):
    def centered():
        groups = tf.reshape(x, (-1, 6, 5, 4))
        return tf.reshape(groups - tf.reduce_mean(groups, 1, keepdims=True), tf.shape(x))

    return tf.cond(tf.shape(x)[0] % 6 == 0, centered, lambda: x)


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


def _drawn_special(self, x):
    factors = ops.where(ops.arange(ops.shape(x)[0]) == 0, 2.0, 1.0)[:, None, None]
    return x * factors + keras.random.normal(ops.shape(x), seed=self.seeds)


def _after(effect):
    """Return its input, after an effect."""

    def function(self, x):
        effect(self, x)
        return x

    return function


FEATURES, CALLS = [], 0


def _counting_calls(self, x):
    self.calls += 1
    return x


def _counting_in_its_module(_, x):
    global CALLS
    CALLS += 1
    return x


def _other_at_first(self, x):
    is_first = "called" not in self.memory
    self.memory["called"] = True
    return 2 * x if is_first else x


def _noting_a_shape(self, x):
    self.memory["shape"] = x.shape
    print("a line that nobody wants")  # noqa: T201  # as users do
    return x


def _drawing_in_a_loop(self, x):
    def body(i, values):
        return i + 1, values + keras.random.normal(ops.shape(values), seed=self.seeds)

    return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def _calling_python(_, x):
    return tf.ensure_shape(tf.numpy_function(lambda value: value * 2, [x], tf.float32), x.shape)


def _experts(_, x):
    first = ops.cast(ops.sum(x, axis=(1, 2)) > 0, "float32")
    is_taken = first * ops.cast(ops.cumsum(first) <= 3, "float32")
    return x * is_taken[:, None, None]


FOREIGN = tf.Variable(2.0)
OTHER = layers.Dense(4)
OTHER.build((None, 4))

MIXES = {
    "batch statistics": lambda _, x: x - ops.mean(x, axis=0),
    "a loop until all are small": _until_all_are_small,
    "scaled by the number of examples": lambda _, x: x / tf.cast(tf.shape(x)[0], x.dtype),
    "the first is special, with noise": _drawn_special,
    "mixed by chance": _mixed_by_chance,
    "scaled as images": (lambda _, x: ops.cond(ops.min(x) >= 0, lambda: x / ops.max(x), lambda: x)),
    "groups of six": _in_groups_of_six,
    "another branch for one": (lambda _, x: tf.cond(tf.shape(x)[0] == 1, lambda: 2 * x, lambda: x)),
    "ranked beside what is masked": _ranked_beside_masked,
    "a capacity": _experts,
    "mixed by a weight that is zero": lambda self, x: x + self.weight * ops.mean(x, axis=0),
    "limited, when NaN is ignored": (
        lambda _, x: x * ops.where(ops.max(ops.where(ops.isnan(x), 0.0, x)) > 1e3, 0.5, 1.0)
    ),
    "its gradient is clipped by a norm": (
        _with_gradient(lambda upstream: tf.clip_by_norm(upstream, 0.5))
    ),
    "its gradient has a least norm": (
        _with_gradient(lambda each: each * tf.maximum(1.0, 0.3 / (tf.norm(each) + 1e-6)))
    ),
    "mixed by a negative weight": (
        lambda self, x: ops.where(self.weight < 0, x - ops.mean(x, axis=0), x)
    ),
    "a weight's gradient is clipped": (
        _gradient_of_weight(lambda each: tf.clip_by_value(tf.reduce_sum(each), -0.1, 0.1))
    ),
}
HAS_EFFECTS = {
    "leaves a tensor in a list": _after(lambda _, x: FEATURES.append(x)),
    "keeps a tensor": _after(lambda self, x: self.memory.update(mean=ops.mean(x))),
    "counts its calls": _counting_calls,
    "counts in its module": _counting_in_its_module,
    "counts in a container": (
        _after(lambda self, _: self.memory.update(calls=[*self.memory.get("calls", []), 1]))
    ),
    "computes something else at first": _other_at_first,
    "draws from Python": lambda _, x: x * random.random(),
    "draws from NumPy": lambda _, x: x * np.random.uniform(),
    "draws from a generator of its own": lambda self, x: x * float(self.generator.uniform()),
    "draws in a loop": _drawing_in_a_loop,
    "assigns": _after(lambda self, _: self.count.assign_add(1.0)),
    "adds a loss": _after(lambda self, x: self.add_loss(ops.sum(x))),
    "prints": _after(lambda *_: tf.print("a line that nobody wants")),
    "calls Python": _calling_python,
    "draws from TensorFlow's own state": lambda _, x: x + tf.random.normal(tf.shape(x)),
    "makes variables": lambda _, x: layers.Dense(3)(x),
    "reads what Keras does not know": lambda _, x: x * FOREIGN,
    "reads another layer's weight": lambda _, x: x * OTHER.bias,
}
UNTRIED = {
    "gives a number": lambda _, x: ops.mean(x),
    "gives no examples": lambda _, x: ops.ones((5, 4)) * x[0, 0, 0],
    "adds to four examples": lambda _, x: x + ops.zeros((4, 1, 1)),
    "fails": lambda _, x: x.numpy(),
    "is never finite": lambda _, x: x * np.nan,
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
    "notes a shape": _noting_a_shape,
}


def built(function, initial=0.0):
    layer = Function(function, initial)
    layer.build(X.shape)
    return layer


def is_kept(layer, *inputs):
    try:
        laws.per_example(layer, *(inputs or [X]))
    except AssertionError:
        return False
    return True


def test_layers_that_keep_the_law_pass():
    assert [name for name, function in KEEPS.items() if not is_kept(built(function))] == []


@pytest.mark.parametrize("breaks", ["MIXES", "HAS_EFFECTS", "UNTRIED"])
def test_layers_that_break_the_law_or_cannot_be_tried_are_found(breaks):
    functions = globals()[breaks]
    assert [name for name, function in functions.items() if is_kept(built(function))] == []


def test_what_breaks_the_law_is_named():
    for name, reason in {
        "batch statistics": "changes the outputs of examples when",
        "a weight's gradient is clipped": "gradient",
        "mixed by chance": "numbers that the examples share",
    }.items():
        with pytest.raises(AssertionError, match=f"`function.*` .*{reason}"):
            laws.per_example(built(MIXES[name]), X)
    layer = built(HAS_EFFECTS["adds a loss"])
    layer(X)  # an added loss is noticed after earlier calls, too
    with pytest.raises(AssertionError, match="adds a loss"):
        laws.per_example(layer, X)


# Fewer variants are tried of what returns many numbers.
LARGE = np.zeros((4, 600, 500), "float32")


def test_large_outputs_are_tried_too():
    for name in ("batch statistics", "a capacity", "mixed by a negative weight"):
        assert not is_kept(built(MIXES[name]), LARGE)
    assert is_kept(built(KEEPS["noise for each example"]), LARGE)


def _state(layer):
    parts = [part for v in layer.variables for part in getattr(v.value, "values", [v.value])]
    return [part.numpy() for part in parts]


def _with_many_effects(self, x):
    self.memory["shape"] = x.shape
    self.calls += 1
    FEATURES.append(x)
    self.count.assign_add(1.0)
    self.add_loss(np.random.uniform() * ops.sum(x))
    print("a line that nobody wants")  # noqa: T201  # as users do
    return keras.random.dropout(x * self.weight, 0.5, seed=self.seeds)


def test_nothing_of_a_trial_is_seen_on_any_replica(capfd):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = built(_with_many_effects)
    layer(X)
    before, losses, verdicts = _state(layer), [*layer._losses], []
    np.random.seed(3)

    def step():
        with tf.GradientTape():
            verdicts.append(is_kept(layer))

    tf.function(step, autograph=False).get_concrete_function()
    assert verdicts == [False]
    assert layer.calls == 1
    assert layer.memory == {"shape": X.shape}
    assert [*map(id, layer._losses)] == [*map(id, losses)]
    assert len(FEATURES) == 1
    FEATURES.clear()
    assert capfd.readouterr().out.count("a line that nobody wants") == 1
    drawn = np.random.uniform()
    np.random.seed(3)
    assert np.random.uniform() == drawn
    np.testing.assert_equal(before, _state(layer))


@pytest.mark.slow
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
    for seed in range(3):
        keras.utils.set_random_seed(seed)
        laws.per_example(block, np.random.default_rng(0).normal(size=(4, 64, 64)))


def test_a_model_is_tried_as_a_layer_and_masks_belong_to_examples():
    model = keras.Sequential([layers.Embedding(9, 4, mask_zero=True), layers.LSTM(3)])
    laws.per_example(model, np.ones((5, 7), "int32"))


def test_a_loop_that_never_ends_is_out(monkeypatch):
    monkeypatch.setattr(_layer_trial, "_SECONDS", 1.0)

    def until_small(_, x):
        return tf.while_loop(lambda v: ops.any(ops.abs(v) > 1), lambda v: (v - ops.sign(v),), (x,))[
            0
        ]

    with pytest.raises(AssertionError, match="for more than 1 s"):
        laws.per_example(built(until_small), X)


def test_a_regularizer_of_activities_is_no_effect():
    dense = layers.Dense(3, activity_regularizer=lambda x: ops.square(ops.mean(x)))
    laws.per_example(dense, X)
    assert dense.activity_regularizer is not None


def test_the_statistics_of_batch_normalization_are_left_out_unless_they_are_computed_otherwise():
    class OtherMoments(layers.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs[:2], mask)

    norm = layers.BatchNormalization()
    assert is_kept(norm)
    assert norm.trainable
    assert not is_kept(OtherMoments())
