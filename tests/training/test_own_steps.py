"""Steps of loops of one's own, exact by the decorator: what calls them, strategies, and errors."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kdpkit import strategies, testing
from kdpkit.training import replica_exact
from tests.training import own_loops
from tests.training.exactness import assert_close

pytestmark = pytest.mark.tensorflow

X, Y = testing.toy_classification(18)
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(11)  # the last one has 7
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mirrored(replicas=2):
    return strategies.select_strategy("mirrored", devices=replicas)


class Trainer:
    """A loop of one's own: a model, its optimizer and metric, and a step that is no method yet."""

    def __init__(self, strategy=None, optimizer=None):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            middle = layers.BatchNormalization(), layers.Dropout(0.5)
            stack = keras.Input((4,)), layers.Dense(8, "tanh"), *middle, layers.Dense(3)
            self.model, self.accuracy = keras.Sequential(stack), keras.metrics.Mean()
            self.optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)

    def step(self, x, y, training=True, *, weight=1.0):
        with tf.GradientTape() as tape:
            logits = self.model(x, training=training)
            loss = weight * CROSS_ENTROPY(y, logits)
        if training:
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
        self.accuracy.update_state(keras.metrics.sparse_categorical_accuracy(y, logits))
        return {"loss": loss, "logits": logits}

    def trained(self, step, strategy=None):
        with strategy.scope() if strategy else contextlib.nullcontext():
            outputs = [step(x, y, weight=tf.constant(0.5)) for x, y in BATCHES]
            outputs += [step(X[:1], Y[:1], weight=2.0), step(X[:7], Y[:7], False)]
        results = [*tf.nest.flatten(outputs), self.accuracy.result()]
        self.accuracy.reset_state()
        variables = [*self.model.variables, *self.optimizer.variables, *self.accuracy.variables]
        return [np.array(keras.ops.convert_to_numpy(x)) for x in (*results, *variables)]


@pytest.fixture(scope="module")
def expected():
    trainer = Trainer()
    return trainer.trained(tf.function(trainer.step))


@pytest.mark.parametrize(
    ("kind", "decorate"),
    [
        ("function", replica_exact),
        ("method", lambda step: tf.function(replica_exact(step))),
    ],
    ids=["plain", "below tf.function"],
)
def test_a_step_trains_what_one_device_trains(kind, decorate, expected):
    strategy = mirrored(3)
    if kind == "method":
        decorated = type("Decorated", (Trainer,), {"step": decorate(Trainer.step)})
        other = decorated(strategy)
        other.step(X[:1], Y[:1])  # makes the variables of its own optimizer
        trainer = decorated(strategy)
        step = trainer.step
    else:
        trainer = Trainer(strategy)
        step = decorate(trainer.step)
    assert_close(trainer.trained(step), expected)  # outside of the scope


def test_a_step_that_runs_eagerly_trains_what_one_device_trains(expected):
    tf.config.run_functions_eagerly(True)
    try:
        strategy = mirrored()
        trainer = Trainer(strategy)
        assert_close(trainer.trained(replica_exact(trainer.step, strategy=strategy)), expected)
        with pytest.raises(ValueError, match="step was made outside"):
            replica_exact(trainer.step)(X, Y)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.slow
def test_a_function_that_loops_over_data_calls_an_exact_step():
    trainer = Trainer(mirrored())
    step = replica_exact(trainer.step)

    @tf.function
    def epoch():
        for x, y in BATCHES:
            step(x, y, weight=0.5)

    epoch()
    other = Trainer()
    for x, y in BATCHES:
        tf.function(other.step)(x, y, weight=0.5)
    assert_close(trainer.model.get_weights(), other.model.get_weights())


def test_a_step_that_another_step_calls_is_part_of_it():
    trained = []
    for strategy, decorate in ((None, tf.function), (mirrored(), replica_exact)):
        trainer = Trainer(strategy)
        loss_of = decorate(
            lambda x, y, model=trainer.model: CROSS_ENTROPY(y, model(x, training=True))
        )

        @decorate
        def step(x, y, model=trainer.model, optimizer=trainer.optimizer, loss_of=loss_of):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        for x, y in BATCHES:
            step(x, y)
        trained.append(trainer.model.get_weights())
    assert_close(*trained)


def test_layers_that_keep_states_of_examples_are_computed_for_all():
    trained = []
    for strategy, decorate in ((None, tf.function), (mirrored(), replica_exact)):
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential(
                [keras.Input(batch_shape=(5, 2, 2)), layers.GRU(3, stateful=True)]
            )
        step = decorate(lambda x, model=model: model(x))
        says = pytest.warns(UserWarning, match="One device computes the step for all examples")
        with says if strategy else contextlib.nullcontext():
            trained.append([np.array(step(tf.reshape(X[:5], (5, 2, 2)))) for _ in range(2)])
    assert_close(*trained)


@pytest.mark.slow
def test_other_steps_go_on_from_the_state_of_an_optimizer():
    """Keras' own `fit` updates each device's copy of it."""
    trained = []
    for strategy, decorate in ((None, tf.function), (mirrored(), replica_exact)):
        trainer = Trainer(strategy)
        trainer.trained(decorate(trainer.step))
        trainer.model.layers[
            1
        ].trainable = False  # BatchNormalization, which `fit` computes otherwise
        trainer.model.layers[2].rate = 0.0
        trainer.model.compile(trainer.optimizer, CROSS_ENTROPY)
        trainer.model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
        trained.append(trainer.model.get_weights())
    assert_close(*trained)


def test_what_a_metric_holds_before_a_step_is_kept():
    with strategies.select_strategy("mirrored", devices=2).scope():
        metric = keras.metrics.Mean()
    metric.total.assign(10.0)
    metric.count.assign(4.0)
    replica_exact(lambda x: metric.update_state(x))(tf.constant([1.0, 1.0]))
    assert [float(v.value.read_value()) for v in metric.variables] == [12.0, 6.0]


def test_a_step_of_no_strategy_runs_on_one_device():
    """A program of one device is as before, and one that forgot the scope of the kit's raises."""
    trainer = Trainer()
    assert trainer.trained(replica_exact(trainer.step, strategy=strategies.select_strategy("one")))
    strategies._made.clear()
    strategies._is_one_used.clear()
    strategy = mirrored()
    try:
        with pytest.raises(ValueError, match=r"step was made outside.* step=.*Trainer.step.*Make"):
            replica_exact(trainer.step)(X, Y)
    finally:
        strategies._is_one_used.set()
        del strategy


def test_what_cannot_be_exact_raises_one_sentence():
    strategy = mirrored()
    trainer = Trainer(strategy)
    step = replica_exact(trainer.step)
    divided = next(iter(strategy.experimental_distribute_dataset(BATCHES)))
    other = tf.distribute.MirroredStrategy(["CPU:1", "CPU:2"])
    made_outside = Trainer(strategy, keras.optimizers.Adam())
    for sentence, call in {
        "this one is divided.*PerReplica": lambda: step(*divided),
        "without `strategy.run`": lambda: strategy.run(step, args=(X, Y)),
        "variable was made outside": lambda: replica_exact(trainer.step, strategy=other)(X, Y),
        "optimizer `adam` was made outside": lambda: replica_exact(made_outside.step)(X, Y),
        "a function of a global batch": lambda: replica_exact(3),
        "Keras model, or a function": lambda: replica_exact(layers.Dense(3)),
        "strategy of a model": lambda: replica_exact(trainer.model, strategy=strategy),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            call()
    with (
        pytest.raises(ValueError, match="Take the gradients inside of the step"),
        tf.GradientTape(),
    ):
        step(X, Y)


def run(name, replicas):
    keras.utils.set_random_seed(0)
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        loop = own_loops.LOOPS[name](replica_exact if replicas else tf.function)
        variables = next(loop)
        return numbers(variables), numbers(next(loop)), numbers(variables)


def numbers(values):
    arrays = map(np.array, map(keras.ops.convert_to_numpy, tf.nest.flatten(values)))
    return [array for array in arrays if array.dtype.kind == "f"]  # not the states of seeds


QUICK = ("tensorflow_custom_training", "dqn")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in own_loops.LOOPS],
)
def test_loops_of_guides_train_what_one_device_trains(name):
    before, outputs, expected = run(name, None)
    change = max(np.abs(a - b).max() for a, b in zip(before, expected, strict=True))
    _, others, weights = run(name, 3)
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-7, atol=1e-6 * change)  # 2e-7 is a bit
    assert_close(others, outputs)
