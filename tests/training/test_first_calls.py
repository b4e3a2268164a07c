"""The first call of a step of one's own: its strategy is found, variables made, mistakes named."""

import functools
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies
from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow
X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")


@pytest.fixture
def strategy():
    return strategies.select_strategy("mirrored", devices=2)


@pytest.fixture
def weight(strategy):
    with strategy.scope():
        return tf.Variable(tf.ones([4]))


class Averaged:
    average = None

    def step(self, x, weight):
        if self.average is None:
            self.average = tf.Variable(tf.ones([]) / 2)
            self.drawn = tf.Variable(lambda: tf.random.uniform([]))
        noise = keras.random.normal(tf.shape(x))  # makes the seed of Keras' own numbers
        self.average.assign(0.5 * self.average + tf.reduce_sum((x + noise) * weight))
        return self.average + self.drawn


def test_variables_that_a_step_makes_before_its_strategy_is_found_are_kept(weight):
    found = []
    for decorate in (tf.function, replica_exact):
        keras.utils.set_random_seed(1)
        averaged = Averaged()
        step = decorate(averaged.step)
        scale = tf.ones([4]) if decorate is tf.function else weight
        found.append([float(step(X, scale)) for _ in range(3)])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)  # of sums of 20 numbers


def test_a_variable_of_the_batch_needs_the_strategy_first(weight):
    made = []

    @replica_exact
    def step(x):
        if not made:
            made.append(tf.Variable(tf.reduce_mean(x)))
        return made[0] * tf.reduce_sum(weight)

    with pytest.raises(ValueError, match=r"variable of its batch.*strategy=strategy"):
        step(X)


def test_a_step_is_called_as_on_one_device(weight):
    @replica_exact
    @functools.partial(tf.function, reduce_retracing=True)
    def step(x, scale=None):
        return tf.reduce_sum(x * weight if scale is None else x * weight * scale)

    @replica_exact
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None])])
    def of_two(x, y):
        return tf.reduce_sum(x * weight * y[:, None])

    for found in (step(X), step(X, 1.0), step(X, scale=tf.ones(4)), of_two(y=tf.ones(5), x=X)):
        np.testing.assert_allclose(found, X.sum(), rtol=1e-5)


def test_a_step_that_only_assigns_finds_its_strategy(weight):
    @replica_exact
    def step(x):
        weight.assign_add(tf.reduce_sum(x, axis=0))

    step(X)
    for copy in weight.values:
        np.testing.assert_allclose(copy, 1 + X.sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_that_still_calls_run_is_told_to_leave_it_out(strategy, weight, is_known):
    @replica_exact(strategy=strategy if is_known else None)
    def step(x):
        per_replica = strategy.run(lambda x: tf.reduce_sum(x * weight), args=(x,))
        return strategy.reduce("SUM", per_replica, axis=None)

    with pytest.raises(ValueError, match=r"runs once .* without `strategy\.run`"):
        step(X)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("makes_variables", [False, True])
def test_a_mistake_of_the_users_is_theirs_with_its_line(weight, makes_variables):
    kept = []

    @replica_exact
    def step(x, y):
        if makes_variables and not kept:
            kept.append(tf.Variable(0.0))
        return tf.matmul(x * weight, y)  # the user's line

    with pytest.raises(ValueError, match="Dimensions must be equal") as raised:
        step(X, X)
    assert "the user's line" in "".join(traceback.format_exception(raised.value))


def test_a_loop_that_one_device_runs_is_reported_with_its_line(strategy, capsys):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])

    @replica_exact
    def step(x):
        total = 0.0
        order = tf.argsort(x[:, 0])
        for _ in tf.range(2):
            total += tf.reduce_sum(model(tf.gather(x, order)) ** 2)
        return total

    step(X)
    assert "`While` at test_first_calls.py" in capsys.readouterr().err
