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
from tests.training.exactness import assert_same_weights
from tests.training.one_graph import DividedStep

pytestmark = pytest.mark.tensorflow


def drawing(function, *shape, **settings):
    def draw(x):
        size = keras.ops.shape(x)[0]
        return getattr(keras.random, function)((size, *shape), seed=11, **settings)

    return draw


@hypothesis.settings(max_examples=6)
@hypothesis.given(
    replicas=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 20),
    width=st.integers(1, 70),
    function=st.sampled_from(["uniform", "normal"]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
)
def test_numbers_are_those_of_one_device(replicas, rows, width, function, dtype):
    assert_same_numbers(drawing(function, width, dtype=dtype), replicas, rows)


def assert_same_numbers(draw, replicas, rows):
    x = np.ones((rows, 2), "float32")
    step = DividedStep(draw, tf.constant(x), replicas)
    np.testing.assert_equal(step.divided(x), step.on_one_device(x))


@pytest.mark.parametrize("replicas", [1, 2])
def test_xla_trains_with_the_numbers_that_are_drawn_without_it(replicas):
    trained = []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            dropped = [layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.SpatialDropout1D(0.5)]
            model = keras.Sequential([keras.Input((4, 3)), *dropped, layers.Dense(2)])
            model.compile("sgd", "mse", jit_compile=jit)
            model = replica_exact(model)
        x = np.linspace(-1, 1, 84, dtype="float32").reshape((7, 4, 3))
        model.fit(x, x[:, :, :2], batch_size=5, epochs=2, verbose=0)
        trained.append(model)
    assert_same_weights(*trained)


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
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_random_function_draws_the_part_of_the_examples(name):
    assert_same_numbers(DRAWINGS[name], 2, 7)


def test_a_shape_without_examples_is_the_same_on_all_devices():
    assert_same_numbers(lambda x: tf.zeros_like(x) + keras.random.normal((1, 2), seed=3), 3, 6)


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
