"""Devices draw, bit for bit, their examples' part of what one device draws for the batch."""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers

from kdpkit import strategies
from kdpkit.training import replica_exact
from kdpkit.training.tensorflow import _patches, _philox, _random
from kdpkit.training.tensorflow._split import split
from kdpkit.training.tensorflow._step import Mesh, Part, Step, running
from kdpkit.training.tensorflow._variable_copies import PartScope
from tests.training.exactness import assert_same_weights

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True, scope="module")
def patches():
    with _patches.installed():
        yield


def drawn(replicas, draw, rows, *, jit=False):
    """Draw for a batch on replicas, in the order of its examples; None is stock Keras."""
    x = tf.random.stateless_uniform((rows, 2), seed=[1, 2])
    if replicas is None:
        return tf.function(draw, jit_compile=jit)(x).numpy()
    mesh = Mesh(strategies.select_strategy("mirrored", devices=replicas))

    @tf.function(autograph=False)
    def run(x):
        step = Step(mesh, None, batch_norm="global")
        division = split(tf.shape(x)[0], replicas, range(replicas), object())
        parts = []
        for index, (start, count, kept) in enumerate(zip(*division[1:4], strict=True)):
            shard = x[start : start + count]
            part = Part(step, index, division)
            with running(step, part), PartScope(part, {}):
                numbers = tf.function(draw, jit_compile=True)(shard) if jit else draw(shard)
            parts.append(numbers[: tf.shape(numbers)[0] // count * kept])
        return parts

    return np.concatenate(
        [part.numpy() for part in run.get_concrete_function(tf.TensorSpec([None, 2]))(x)]
    )


def drawing(function, *shape, **settings):
    def draw(x):
        size = keras.ops.shape(x)[0]
        return getattr(keras.random, function)((size, *shape), seed=11, **settings)

    return draw


@hypothesis.settings(max_examples=6)
@hypothesis.given(
    replicas=st.sampled_from([1, 2, 3, 4, 8]),
    rows=st.integers(1, 20),
    width=st.integers(1, 70),
    function=st.sampled_from(["uniform", "normal"]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
)
def test_numbers_are_those_of_one_device(replicas, rows, width, function, dtype):
    draw = drawing(function, width, dtype=dtype)
    np.testing.assert_array_equal(drawn(replicas, draw, rows), drawn(None, draw, rows))


def test_xla_draws_the_same_for_any_number_of_replicas():
    draw = drawing("normal", 3)
    two = drawn(2, draw, 7, jit=True)
    np.testing.assert_array_equal(drawn(4, draw, 7, jit=True), two)
    assert np.unique(two).size == two.size


@hypothesis.settings(max_examples=8)
@hypothesis.given(
    count=st.integers(1, 70),
    key=st.integers(0, 2**64 - 1),
    counter=st.tuples(st.integers(2**64 - 20, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
def test_philox_in_vectors_has_the_bits_of_the_one_in_xla(count, key, counter):
    @tf.function(jit_compile=True)
    def draw(**numbers):
        expected = tf.raw_ops.StatelessRandomUniformV2(shape=[count], alg=1, **numbers)
        return _philox.uniform([count], **numbers), expected

    numbers = draw(key=tf.constant([key], tf.uint64), counter=tf.constant(counter, tf.uint64))
    np.testing.assert_array_equal(*numbers)


def test_a_step_that_xla_compiles_for_a_cpu_draws_by_it(monkeypatch):
    draw = drawing("uniform", 3)
    expected = drawn(1, draw, 7, jit=True)
    monkeypatch.setattr(_philox, "uniform", lambda shape, **_: tf.zeros(shape))
    assert not drawn(1, draw, 7, jit=True).any()
    monkeypatch.setattr(_random, "_is_compiled_for_cpu", lambda: False)
    np.testing.assert_array_equal(drawn(1, draw, 7, jit=True), expected)


DRAWINGS = {
    "dropout of whole examples": lambda x: keras.random.dropout(
        keras.ops.ones_like(x), 0.5, noise_shape=(keras.ops.shape(x)[0], 1), seed=11
    ),
    "truncated_normal": drawing("truncated_normal", 5),
    "randint": drawing("randint", 5, minval=0, maxval=100),
    "gamma": drawing("gamma", 5, alpha=2.0),
    "beta": drawing("beta", 1, alpha=0.4, beta=0.4),
    "several entries for each example": lambda x: keras.random.uniform(
        (3 * keras.ops.shape(x)[0], 5), seed=3
    ),
    "dropout": lambda x: keras.random.dropout(
        keras.ops.ones((keras.ops.shape(x)[0], 9)), 0.5, seed=3
    ),
    "categorical": lambda x: keras.random.categorical(x, 3, seed=5),
    "without a seed": lambda x: keras.random.uniform((keras.ops.shape(x)[0], 3)),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_random_function_draws_the_part_of_the_examples(name):
    def start_again():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)

    start_again()
    one = drawn(None, DRAWINGS[name], 7)
    start_again()
    np.testing.assert_array_equal(drawn(2, DRAWINGS[name], 7), one)


def test_a_shape_without_examples_is_the_same_on_all_devices():
    def draw(x):
        return tf.zeros_like(x) + keras.random.normal((1, 2), seed=3)

    np.testing.assert_array_equal(drawn(3, draw, 6), drawn(None, draw, 6))


@pytest.mark.parametrize("kind", [layers.Dropout, layers.AlphaDropout])
def test_eagerly_replicas_of_one_example_drop_the_same_of_all_examples(kind):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 6)).astype("float32"), random.integers(0, 3, 2)

    def classify():
        keras.utils.set_random_seed(0)
        dropout = kind(0.5, noise_shape=(1, 6))
        model = keras.Sequential([keras.Input((6,)), dropout, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, run_eagerly=True)
        return model

    with strategies.select_strategy("mirrored", devices=2).scope():
        split = replica_exact(classify())
    one = classify()
    for model in (one, split):
        model.fit(x, y, shuffle=False, verbose=0)
    assert_same_weights(split, one)
