"""What `TrainingLoop` trains, beside Keras' `fit` on one device; what it raises.

On both backends: tests/test_environments.py runs this file again on JAX.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdpkit
from kdpkit import strategies, testing
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop
from tests.training.exactness import ON_JAX, assert_same_weights, cross_entropy


def batches(size=4, examples=10, weights=None):
    parts = testing.toy_classification(examples)
    parts = parts if weights is None else (*parts, weights)
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


def strategy_of(replicas):
    if ON_JAX:
        return kdpkit.sharding.DataParallel(replicas)
    if replicas == 1:
        return strategies.select_strategy("one")
    return strategies.select_strategy("mirrored", devices=replicas)


def scope_of(strategy):
    return contextlib.nullcontext() if ON_JAX else strategy.scope()


def loop_on(replicas, build=testing.tiny_classifier, loop=TrainingLoop, **settings):
    strategy = strategy_of(replicas)
    with scope_of(strategy):
        model = build()
    settings = {"optimizer": "adam", "loss": cross_entropy(), "metrics": ["accuracy"]} | settings
    return loop(model, strategy=strategy, **settings)


def trained(replicas, data=None, epochs=2, **settings):
    """Train a loop; return it with what it logged."""
    loop = loop_on(replicas, **settings)
    history = loop.fit(batches() if data is None else data, epochs=epochs, verbose=0)
    return loop, history.history


def assert_same(one, other, tolerance=1e-6):
    (loop, history), (other_loop, other_history) = one, other
    assert history.keys() == other_history.keys()
    for name, values in history.items():
        assert values == pytest.approx(other_history[name], rel=1e-5, abs=1e-6), name
    assert_same_weights(loop.model, other_loop.model, tolerance)


def steps_of(loop):
    return int(keras.ops.copy(loop.optimizer.iterations))


# The table: a loop on replicas trains what `fit` trains on one device. The settings that `compile`
# has too are rows of the table of exactness.


def of(*after, shape=(4,), seed=0, **settings):
    """Return a function that builds a model with a seed."""

    def build():
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input(shape, **settings), *(make() for make in after)])

    return build


def of_tokens(*after, **settings):
    embedding = functools.partial(layers.Embedding, 9, 4, **settings)
    return of(embedding, *after, shape=(6,), seed=1, dtype="int32")


def tokens(*, as_labels=False):
    random = np.random.default_rng(0)
    words, labels = random.integers(0, 9, (10, 6)), random.integers(0, 3, 10)
    return tf.data.Dataset.from_tensor_slices((words, words if as_labels else labels)).batch(4)


class Windows(layers.Layer):
    """Drops parts of the windows of all examples, which are its first axis, as in a Swin."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3, seed=5)

    def call(self, x, training=False):
        windows = keras.ops.reshape(x, (-1, 4))
        return keras.ops.reshape(self.dropout(windows, training=training), (-1, 2, 4))


of_three = functools.partial(layers.Dense, 3)
# It draws random numbers for examples, for parts of them, and in a cell.
drawing = of(
    lambda: layers.Dense(8),
    lambda: layers.GaussianNoise(0.3),
    lambda: layers.Reshape((2, 4)),
    lambda: layers.Dropout(0.3, noise_shape=(None, 2, 1)),
    Windows,
    lambda: layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.3, unroll=True),
    of_three,
)


def two_outputs():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    return keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in ("b", "a")})


def of_one_axis():
    """Return a model whose predictions have the axis of the examples alone."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))


def labels_of_two():
    x, _ = testing.toy_classification(10)
    return tf.data.Dataset.from_tensor_slices((x, {"a": x[:, :1], "b": x[:, 1:2]})).batch(4)


class Counted(keras.optimizers.schedules.LearningRateSchedule):
    """Falls from step to step, and counts how often it is asked."""

    calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.1 / (1 + keras.ops.cast(step, "float32"))


class RateOfEach(keras.optimizers.SGD):
    """Halves the rate with every variable, which it asks for itself."""

    asked = 0

    def _get_current_learning_rate(self):
        return super()._get_current_learning_rate() * 0.5**self.asked

    def update_step(self, gradient, variable, learning_rate):  # noqa: ARG002
        self.asked = self._get_variable_index(variable)
        super().update_step(gradient, variable, self.learning_rate)
        self.asked = 0


def sgd(**settings):
    return lambda: keras.optimizers.SGD(**{"learning_rate": 0.5} | settings)


def clipped_and_averaged():
    return keras.optimizers.SGD(0.2, 0.9, global_clipnorm=0.05, use_ema=True, ema_momentum=0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: what is trained, the settings that only a loop has, and those of `compile`."""

    loop: dict[str, Any]
    build: Callable = testing.tiny_classifier
    data: Callable = batches
    optimizer: Callable = lambda: keras.optimizers.Adam()
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    replicas: Any = 2
    logs: bool = True  # with several outputs Keras on TensorFlow logs means over batches


pooled = of_tokens(layers.GlobalAveragePooling1D, of_three)
per_token = of_tokens(lambda: layers.Dense(9, kernel_regularizer="l2"), mask_zero=True)
CASES = {
    "many steps in a call": Case({"steps_per_loop": 4}, data=lambda: batches(2, 13)),
    "micro-batches": Case(
        {"accumulation": 3},
        data=lambda: batches(5, 11, np.arange(11, dtype="float32")),
        optimizer=sgd(global_clipnorm=0.01),
    ),
    "micro-batches under a mask": Case(
        {"accumulation": 2},
        per_token,
        lambda: tokens(as_labels=True),
        compiled={"metrics": None},
        replicas=3,
    ),
    "micro-batches of random numbers": Case(
        {"accumulation": 2}, drawing, lambda: batches(7, 10), sgd(learning_rate=0.1)
    ),
    "micro-batches of random numbers on one device": Case(
        {"accumulation": 2},
        drawing,
        lambda: batches(4, 12).map(lambda *xs: [tf.ensure_shape(x, [4, *x.shape[1:]]) for x in xs]),
        sgd(learning_rate=0.1),
        replicas=1,
    ),
    "micro-batches of sparse gradients": Case({"accumulation": 2}, pooled, tokens),
    "micro-batches of sparse features": Case(
        {"accumulation": 2},
        of(of_three, sparse=True),
        lambda: batches().map(lambda x, y: (tf.sparse.from_dense(x), y)),
    ),
    "XLA, clipped and averaged": Case(
        {"jit_compile": True}, pooled, tokens, clipped_and_averaged, replicas=3
    ),
    "XLA on another device": Case({"jit_compile": True}, pooled, tokens, replicas=["CPU:1"]),
    "a list of losses": Case(
        {},
        two_outputs,
        labels_of_two,
        compiled={"loss": ["mse", "mae"], "loss_weights": [1.0, 0.2], "metrics": None},
        logs=False,
    ),
    "predictions of one axis": Case(
        {"jit_compile": False},
        of_one_axis,
        compiled={"loss": "mse", "metrics": ["mae"]},
        replicas=3,
    ),
    "a loss that compares the examples, under a mask of its own": Case(
        {},
        of(of_three, layers.UnitNormalization),
        optimizer=sgd(learning_rate=0.01),
        compiled={"loss": keras.losses.Circle(gamma=2), "metrics": None},
        replicas=3,
    ),
    "a rate of each variable": Case(
        {"jit_compile": False}, optimizer=lambda: RateOfEach(Counted()), replicas=1
    ),
}
ON_JAX_TOO = ("many steps in a call", "micro-batches of random numbers")
ON_TENSORFLOW = (
    "micro-batches of random numbers on one device",
    "micro-batches of sparse features",  # a loop on JAX raises
    "XLA on another device",
    "a rate of each variable",
)


def cases():
    for name, case in CASES.items():
        marks = [pytest.mark.tensorflow] if name in ON_TENSORFLOW else []
        marks += [pytest.mark.jax] if ON_JAX and name in ON_JAX_TOO else []
        marks += [] if name == "micro-batches" else [pytest.mark.slow]
        yield pytest.param(case, id=name, marks=marks)


@pytest.mark.parametrize("case", [*cases()])
def test_a_loop_trains_what_fit_trains_on_one_device(case):
    data, compiled = case.data(), {"loss": cross_entropy(), "metrics": ["accuracy"]} | case.compiled
    model = case.build()
    model.compile(case.optimizer(), **compiled)
    model.optimizer.build(model.trainable_variables)
    expected = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    settings = compiled | {"optimizer": case.optimizer()} | case.loop
    loop = loop_on(case.replicas, case.build, **settings)
    history = loop.fit(data, data, epochs=2, verbose=0).history
    assert history.keys() == expected.keys()
    for name, values in expected.items() if case.logs else ():
        assert history[name] == pytest.approx(values, rel=1e-5), name
    assert_same_weights(loop.model, model, 2e-6)
    assert steps_of(loop) == int(keras.ops.copy(model.optimizer.iterations))


def test_one_step_is_the_one_worked_by_hand():
    def slope():
        """Build y = w x from w = 0."""
        settings = {"kernel_regularizer": keras.regularizers.L1(0.5), "use_bias": False}
        dense = layers.Dense(1, kernel_initializer="zeros", **settings)
        return keras.Sequential([keras.Input((1,)), dense])

    x = np.array([[1.0], [2.0], [3.0]], "float32")
    weights = np.array([1.0, 0.0, 2.0], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x, weights)).batch(3)
    loop = loop_on(2, slope, optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=())
    history = loop.fit(data, epochs=1, verbose=0)
    # Losses 4, 16 and 36, weighted 4 + 0 + 72, over three examples.
    assert history.history["loss"] == [pytest.approx(76 / 3)]
    # d/dw is -4 x^2: (4 + 0 + 2 * 36) / 3 of it; 0.5 |w| has the slope 0 at 0, and 0.5 on JAX.
    w = float(np.squeeze(loop.model.get_weights()[0]))
    assert w == pytest.approx(0.1 * (76 / 3 - 0.5 * ON_JAX))
    # And now it has one, and counts once: 0.5 |w|.
    assert loop.evaluate(data, verbose=0) == {
        "loss": pytest.approx(((2 - w) ** 2 * (1 + 18)) / 3 + 0.5 * w, rel=1e-5)
    }


def test_the_losses_of_several_outputs_are_logged_and_add_up():
    settings = {"loss": "mse", "loss_weights": {"a": 1.0, "b": 0.3}, "metrics": {"a": ["mae"]}}
    _, history = trained(2, labels_of_two(), build=two_outputs, **settings)
    assert set(history) == {"loss", "a_loss", "b_loss", "a_mae"}
    total = np.array(history["a_loss"]) + 0.3 * np.array(history["b_loss"])
    np.testing.assert_allclose(history["loss"], total, rtol=1e-5)


# How steps are run.


@pytest.mark.slow
def test_many_steps_in_a_call_compile_once_and_callbacks_see_the_last_of_each():
    traces, ends = [], []

    class Counting(TrainingLoop):
        def per_example_loss(self, x, y, *, training):
            traces.append(training)
            return super().per_example_loss(x, y, training=training)

    data = batches(2, 13).repeat(2)  # 14 batches: calls of 4, 4, 4 and 2
    loop = loop_on(2, loop=Counting, steps_per_loop=4)
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: ends.append((batch, len(logs or {}))),
        on_train_batch_end=lambda batch, logs: ends.append((batch, len(logs))),
    )
    loop.fit(data, epochs=2, callbacks=watch, verbose=0)
    assert ends[:8] == [(0, 0), (3, 2), (4, 0), (7, 2), (8, 0), (11, 2), (12, 0), (13, 2)]
    # On JAX once for each length of a call, of which a scan takes the types first.
    assert traces.count(True) == (4 if ON_JAX else 1)
    assert steps_of(loop) == 28


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_schedule_is_asked_once_a_step_and_trains_what_fit_trains():
    def made(schedule):
        inner = keras.optimizers.AdamW(schedule, weight_decay=0.1)
        return keras.optimizers.LossScaleOptimizer(inner)

    schedule, strategy = Counted(), strategy_of(2)
    with scope_of(strategy):
        settings = {"optimizer": made(schedule), "loss": cross_entropy(), "jit_compile": True}
        loop = TrainingLoop(testing.tiny_classifier(), strategy=strategy, **settings)
    loop.fit(batches(), epochs=2, verbose=0)
    assert schedule.calls == 1  # for six steps of four weights each, that are traced once
    model = testing.tiny_classifier()
    model.compile(made(Counted()), cross_entropy())
    model.fit(batches(), epochs=2, verbose=0)
    assert_same_weights(loop.model, model)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("build", [testing.tiny_classifier, per_token])
def test_replicas_of_a_tpu_add_up_to_one_device(build):
    """CPUs take the place of its cores."""
    from kdpkit.training.tensorflow._tpu import TpuSteps

    data = tokens(as_labels=True) if build is per_token else batches(5)
    loops = [loop_on(r, build, optimizer=clipped_and_averaged(), metrics=()) for r in (1, 3)]
    loops[1]._steps = TpuSteps(loops[1], loops[1].strategy, None)
    one, tpu = ((loop, loop.fit(data, data, epochs=2, verbose=0).history) for loop in loops)
    assert_same(one, tpu)
    np.testing.assert_allclose(
        *(loop.predict(data, verbose=0) for loop in loops), rtol=1e-4, atol=1e-6
    )


# What a user may change.


class Adversarial(TrainingLoop):
    """Trains on examples moved against the model, by the sign of the gradient of the loss."""

    def per_example_loss(self, x, y, *, training):
        if not training:
            return super().per_example_loss(x, y, training=False)
        losses, _ = super().per_example_loss(x, y, training=True)
        moved = x + 0.1 * keras.ops.sign(self.gradient(x, y))
        attacked, predictions = super().per_example_loss(moved, y, training=True)
        return (losses + attacked) / 2, predictions

    def gradient(self, x, y):
        def loss_of(x):
            losses, _ = super(Adversarial, self).per_example_loss(x, y, training=True)
            return keras.ops.sum(losses)

        if ON_JAX:
            return jax.grad(loss_of)(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x)
        return tape.gradient(loss, x)


class OwnStep(keras.Sequential):
    """A model whose step is its own."""

    def train_step(self, data):
        return super().train_step(data)


def test_an_adversarial_step_is_the_same_on_replicas_and_in_place_of_the_models_own():
    def build():
        return OwnStep(testing.tiny_classifier().layers)

    one = trained(1, loop=Adversarial)
    assert_same(one, trained(2, loop=Adversarial, build=build))
    assert one[1]["loss"][0] > trained(1, epochs=1)[1]["loss"][0]
    with pytest.raises(ValueError, match=r"`train_step` of its own.*Received: model='OwnStep'"):
        trained(2, build=build)


def test_a_loop_without_metrics_forgets_those_that_the_model_was_compiled_with():
    model = testing.tiny_classifier()
    model.compile("sgd", cross_entropy(), metrics=["accuracy"], weighted_metrics=["mse"])
    loop = TrainingLoop(model, optimizer="sgd", loss=cross_entropy())
    assert [*loop.fit(batches(), epochs=1, verbose=0).history] == ["loss"]


# Callbacks.


class Recorder(keras.callbacks.Callback):
    """Keeps every call that Keras makes, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
                setattr(self, name, lambda *args, name=name, **kw: self.note(name, args, kw))

    def note(self, name, args, keywords):
        values = [*args, *keywords.values()]
        self.calls.append((name, *[v if not isinstance(v, dict) else dict(v) for v in values]))


def test_callbacks_are_called_as_by_keras_fit_and_may_stop_it():
    def watching(recorder):
        stopping = keras.callbacks.EarlyStopping("loss", min_delta=10.0, restore_best_weights=True)
        return {"epochs": 5, "verbose": 0, "callbacks": [recorder, stopping]}

    model = testing.tiny_classifier()
    model.compile("adam", cross_entropy(), metrics=["accuracy"])
    theirs, ours = Recorder(), Recorder()
    model.fit(batches(), validation_data=batches(3), **watching(theirs))
    loop = loop_on(2)
    loop.fit(batches(), batches(3), **watching(ours))
    assert_same_weights(loop.model, model)
    assert len(ours.calls) == len(theirs.calls) == 2 + 2 * (2 + 2 * 3 + 2 + 2 * 4)
    for (name, *arguments), (other_name, *other_arguments) in zip(
        ours.calls, theirs.calls, strict=True
    ):
        assert name == other_name
        for mine, other in zip(arguments, other_arguments, strict=True):
            assert mine == (pytest.approx(other, rel=1e-5) if isinstance(other, dict) else other)


def test_the_progress_lines_are_those_of_keras(capsys):
    loop_on(1).fit(batches(), batches(), epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 1/2"
    shown = re.fullmatch(r"3/3 - \S+ - \S+ - (.*)", lines[1])[1]
    assert re.sub(r": [\d.]+", "", shown) == "accuracy - loss - val_accuracy - val_loss"


# Evaluation and prediction.


def test_metrics_of_several_numbers_and_predictions_keep_their_structure():
    x, y = testing.toy_classification(5)
    data = tf.data.Dataset.from_tensor_slices((x, np.eye(3)[y])).batch(3)
    loop = loop_on(2, loss="mse", metrics=[keras.metrics.F1Score()])
    assert loop.evaluate(data, verbose=0)["f1_score"].shape == (3,)
    inputs = keras.Input((4,))
    outputs = {"double": inputs * 2, "pair": [inputs[:, 0], inputs + 1]}
    loop = loop_on(2, lambda: keras.Model(inputs, outputs), metrics=())
    predicted = loop.predict(tf.data.Dataset.from_tensor_slices(x).batch(3), verbose=0)
    np.testing.assert_array_equal(predicted["double"], 2 * x)
    np.testing.assert_array_equal(predicted["pair"][0], x[:, 0])
    np.testing.assert_array_equal(predicted["pair"][1], x + 1)


# How much of a dataset.


def test_an_epoch_of_some_steps_goes_on_where_the_last_one_stopped():
    loop = loop_on(1)
    loop.fit(batches(2, 8), epochs=3, steps_per_epoch=2, verbose=0)  # the third begins again
    assert steps_of(loop) == 6
    with pytest.raises(ValueError, match=r"`train` ended after 1 of the 3 steps of an epoch"):
        loop.fit(batches(2, 8), epochs=2, steps_per_epoch=3, verbose=0)


def test_a_dataset_of_unknown_length_is_trained_on_to_its_end_from_the_epoch_asked_for():
    data = batches(2, 10).filter(lambda x, y: True)  # noqa: ARG005 a predicate's arguments
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    loop = loop_on(2, steps_per_loop=2)
    history = loop.fit(data, epochs=5, initial_epoch=3, verbose=0)
    assert steps_of(loop) == 10
    assert history.epoch == [3, 4]


def test_a_dataset_that_counts_epochs_has_the_next_one_in_the_next_fit():
    x, y = testing.toy_classification(10)
    model, counted = testing.tiny_classifier(), []
    model.compile(keras.optimizers.SGD(0.5), cross_entropy())
    loop = loop_on(2, optimizer=keras.optimizers.SGD(0.5), metrics=())
    for fit in (functools.partial(model.fit, shuffle=False), loop.fit):
        data = ArrayBatches((x, y), global_batch_size=4, seed=0, remainder="keep")
        for epochs in (1, 2, 1):
            fit(data, epochs=epochs, verbose=0)
            counted.append(data.epoch)
    assert counted == 2 * [1, 3, 4]
    assert_same_weights(loop.model, model, 2e-6)


class AlwaysDropout(layers.Dropout):
    """Draws while it predicts as well (Gal and Ghahramani 2016)."""

    def call(self, inputs, training=False):  # noqa: ARG002  # Keras passes it
        return super().call(inputs, training=True)


def test_what_is_drawn_while_predicting_is_drawn_again_by_each_batch_and_call():
    x, _ = testing.toy_classification(10)
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)

    build = of(lambda: AlwaysDropout(0.5, seed=1), of_three)
    model, loop = build(), loop_on(2, build, metrics=())
    for _ in range(2):
        np.testing.assert_allclose(loop.predict(data, verbose=0), model.predict(data), rtol=1e-5)


# What compares the examples of a batch.


class Centred(layers.Layer):
    """Subtracts the mean of the examples."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


unbiased = functools.partial(layers.Dense, 8, use_bias=False)
centring = of(unbiased, Centred, of_three, seed=2)


class Contrastive(TrainingLoop):
    """Pushes the predictions of different examples apart."""

    def per_example_loss(self, x, y, *, training):
        losses, predictions = super().per_example_loss(x, y, training=training)
        products = keras.ops.matmul(predictions, keras.ops.transpose(predictions))
        return losses + keras.ops.logsumexp(products, axis=1), predictions


def spread(y, predictions):
    """Return a loss for each example that depends on the others."""
    return cross_entropy()(y, predictions) + keras.ops.std(predictions, axis=0)[0] + 0.0 * y


@pytest.mark.parametrize(
    "settings", [{"loop": Contrastive}, pytest.param({"build": centring}, marks=pytest.mark.slow)]
)
def test_it_is_compared_on_replicas_as_on_one_device(settings):
    assert_same(trained(1, **settings), trained(3, **settings))


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("settings", [{"accumulation": 2}, {"jit_compile": True}])
def test_batch_statistics_are_those_of_one_device(settings):
    """Those of each micro-batch of one device, too."""
    norm = functools.partial(layers.BatchNormalization, momentum=0.8)
    settings = {"build": of(unbiased, norm, of_three, seed=2)} | settings
    assert_same(trained(1, **settings), trained(3, **settings))


# What cannot be.


class ByColumn(TrainingLoop):
    """Takes a mean over the examples instead of over the columns."""

    def per_example_loss(self, x, y, *, training):  # noqa: ARG002 a method's arguments
        predictions = self.model(x, training=training)
        return keras.ops.mean(predictions, axis=0), predictions


class WithoutPredictions(TrainingLoop):
    """Forgets what the metrics are to see."""

    def per_example_loss(self, x, y, *, training):
        del y
        return keras.ops.mean(self.model(x, training=training), axis=1)


stateful = of(lambda: layers.LSTM(2, stateful=True), of_three, shape=(4, 1), batch_size=4)
INVALID = [
    ({"steps_per_loop": 0}, "`steps_per_loop` must be a positive integer.*Received: steps_per"),
    ({"optimizer": None}, "no optimizer to train with"),
    ({"jit_compile": "yes"}, "`jit_compile` must be one of 'auto', True, False.*'yes'"),
    ({"loss": None}, "no loss to train with.*Received: loss=None"),
    (
        {"loss": keras.losses.circle, "accumulation": 2},
        r"examples of a batch together.*Received: loss='circle'.*accumulation=1",
    ),
    (
        {"build": of_one_axis, "loss": "mse", "metrics": None, "accumulation": 2},
        r"examples of a batch together.*predictions_shape=.*`\(examples, 1\)`",
    ),
    (
        {"loop": ByColumn},
        r"a loss for each example.*Received: losses_shape=\(3,\), num_examples=13",
    ),
    ({"loop": WithoutPredictions}, r"must return `\(losses, predictions\)`.*Received: returned='"),
    ({"data": batches().unbatch()}, "`train` gives single examples.*batch"),
    ({"data": batches().take(0)}, "`train` gave no batch"),
    ({"data": batches().repeat()}, "`train` never ends.*`steps_per_epoch`"),
    ({"data": batches().map(lambda x, _: x)}, "computed from labels"),
    (
        {"data": batches().map(lambda x, y: (x, {"a": y, "b": y}))},
        r"`labels` must have one entry.*outputs=1, labels={'a': \(13,\), 'b': \(13,\)}",
    ),
    ({"data": np.ones((4, 4))}, "`train` must .* batches, and is a ndarray"),
]
OF_TWO = {"data": labels_of_two(), "build": two_outputs, "metrics": ()}
ONE_ENTRY = "one entry for each output.*Received.*"
INVALID_ON_TENSORFLOW = [
    ({"build": centring, "accumulation": 2}, "layer `centred.*changes.*some of the examples"),
    ({"loop": Contrastive, "accumulation": 2}, "loss changes.*some of the examples alone"),
    ({"loss": spread, "accumulation": 2}, "loss changes.*some of the examples alone"),
    ({"build": stateful}, "goes on from a state for each example.*layer='lstm'"),
    # Both backends share these.
    (OF_TWO | {"loss": {"a": "mse", "typo": "mse"}}, f"{ONE_ENTRY}typo"),
    (OF_TWO | {"loss": "mse", "loss_weights": [1, 2, 3]}, rf"{ONE_ENTRY}loss_weights=\[1, 2, 3\]"),
    (
        OF_TWO | {"loss": ["mse", "mse"], "build": testing.tiny_classifier},
        f"{ONE_ENTRY}outputs=1, loss=",
    ),
]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        *INVALID,
        *(pytest.param(*values, marks=pytest.mark.tensorflow) for values in INVALID_ON_TENSORFLOW),
    ],
)
def test_settings_and_data_that_cannot_be_trained_on_raise(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        trained(2, **settings)


def test_what_is_no_strategy_or_was_built_outside_of_it_raises():
    settings = {"optimizer": "sgd", "loss": cross_entropy()}
    with pytest.raises(ValueError, match="strategy.* Received: strategy='mirrored'"):
        TrainingLoop(testing.tiny_classifier(), strategy="mirrored", **settings)
    with pytest.raises(ValueError, match="must be a Keras model"):
        TrainingLoop(lambda x: x, **settings)
    if not ON_JAX:
        with pytest.raises(
            ValueError, match="The model was made outside the strategy's scope.*Mirrored"
        ):
            TrainingLoop(testing.tiny_classifier(), strategy=strategy_of(2), **settings)
        optimizer = keras.optimizers.Adam()
        optimizer.build(testing.tiny_classifier().trainable_variables)
        with pytest.raises(ValueError, match="originally built with"):
            trained(2, optimizer=optimizer)


def test_what_changed_since_the_first_fit_raises():
    loop, _ = trained(1, epochs=1)
    weights = loop.model.get_weights()
    loop.model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"Other weights are trainable.*then=4, now=2.*new loop"):
        loop.fit(batches(), epochs=1, verbose=0)
    loop.model.layers[0].trainable = True
    loop.model.compile(optimizer="sgd", loss=cross_entropy())
    with pytest.raises(ValueError, match=r"compiled again.*Make a new loop"):
        loop.fit(batches(), epochs=1, verbose=0)
    np.testing.assert_equal(weights, loop.model.get_weights())


@pytest.mark.tensorflow
def test_an_operation_that_xla_does_not_have_is_named():
    def through_python(x):
        return x + tf.ensure_shape(tf.numpy_function(np.square, [x], tf.float32), x.shape)

    build = of(lambda: layers.Lambda(through_python), of_three)
    loop = loop_on(1, build, jit_compile=True)
    with pytest.raises(ValueError, match="XLA cannot compile.*PyFunc.*Use `jit_compile=False`"):
        loop.fit(batches(), epochs=1, verbose=0)


@pytest.mark.jax
def test_variances_are_differentiated_with_a_pass_less_over_the_input_to_the_same_gradient():
    from kdpkit.training.jax import _moments

    x, weights = np.random.default_rng(0).normal(size=(2, 40, 5)).astype("float32")

    def loss(x):
        mean, variance = keras.ops.moments(x, axes=[0])
        return (weights[0] * variance + weights[1] * mean).sum()

    def passes():
        return str(jax.make_jaxpr(jax.grad(lambda x: loss(x)))(x)).count("reduce_sum")

    class Watching(layers.Layer):
        def call(self, x):
            counts.append(passes())
            return x

    plain, counts = jax.grad(loss)(x), [passes()]
    model = keras.Sequential([keras.Input((5,)), Watching(), layers.Dense(1)])
    loop = TrainingLoop(model, optimizer="sgd", loss="mse")
    loop.fit(ArrayBatches((x, x[:, :1]), global_batch_size=8), epochs=1, verbose=0)
    assert counts[-1] < counts[0] == passes()
    with _moments.of_constant_means():
        np.testing.assert_allclose(jax.grad(loss)(x), plain, rtol=0, atol=1e-6)
