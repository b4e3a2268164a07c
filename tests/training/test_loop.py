"""One device against many, hand-worked values, callbacks and checkpoints of `TrainingLoop`.

On both backends: tests/test_environments.py runs this file again on JAX.
"""

import contextlib
import gc
import re

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdpkit
from kdpkit import callbacks, strategies, testing
from kdpkit.training import TrainingLoop

ON_JAX = keras.backend.backend() == "jax"


def batches(size=4, examples=10, weights=None):
    parts = testing.toy_classification(examples)
    parts = parts if weights is None else (*parts, weights)
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def strategy_of(replicas):
    if ON_JAX:
        return kdpkit.sharding.data_mesh(replicas)
    if replicas == 1:
        return strategies.select_strategy("one")
    return strategies.select_strategy("mirrored", devices=replicas)


def scope_of(strategy):
    return contextlib.nullcontext() if ON_JAX else strategy.scope()


def loop_on(replicas, build=testing.tiny_classifier, loop=TrainingLoop, **settings):
    strategy = strategy_of(replicas)
    with scope_of(strategy):
        model = build()
    settings = {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"]} | settings
    return loop(model, strategy=strategy, **settings)


def trained(replicas, data=None, epochs=2, **settings):
    """Train a loop and give it with its History."""
    loop = loop_on(replicas, **settings)
    history = loop.fit(batches() if data is None else data, epochs=epochs, verbose=0)
    return loop, history.history


def assert_same(one, other, tolerance=1e-6):
    (loop, history), (other_loop, other_history) = one, other
    assert history.keys() == other_history.keys()
    for name, values in history.items():
        assert values == pytest.approx(other_history[name], rel=1e-5, abs=1e-6), name
    weights = zip(loop.model.get_weights(), other_loop.model.get_weights(), strict=True)
    for a, b in weights:
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_a_loop_without_metrics_forgets_those_that_the_model_was_compiled_with():
    model = testing.tiny_classifier()
    model.compile("sgd", crossentropy(), metrics=["accuracy"], weighted_metrics=["mse"])
    loop = TrainingLoop(model, optimizer="sgd", loss=crossentropy())
    assert [*loop.fit(batches(), epochs=1, verbose=0).history] == ["loss"]
    assert [*loop.evaluate(batches(), verbose=0)] == ["loss"]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_loop_tells_when_the_choice_of_xla_is_made():
    loop = loop_on(1, jit="measure")
    assert loop.jit is None
    while loop.jit is None:
        loop.fit(batches(), epochs=1, verbose=0)
    assert loop.jit in (True, False)
    assert [loop_on(1, jit=jit).jit for jit in (True, False)] == [True, False]


def slope(**settings):
    """Build y = w x from w = 0."""
    return keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(1, use_bias=False, kernel_initializer="zeros", **settings),
        ]
    )


def weight_of(loop):
    return float(np.squeeze(loop.model.get_weights()[0]))


def steps_of(loop):
    return int(keras.ops.copy(loop.optimizer.iterations))


# One device against many.


@pytest.mark.parametrize(
    ("replicas", "size"),
    [
        pytest.param(1, 4, marks=pytest.mark.slow),
        (2, 4),
        pytest.param(2, 5, marks=pytest.mark.slow),
        pytest.param(3, 4, marks=pytest.mark.slow),
        pytest.param(4, 4, id="replicas without examples"),
    ],
)
def test_weights_and_logs_are_those_of_keras_fit_on_one_device(replicas, size):
    model = testing.tiny_classifier()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    expected = model.fit(batches(size), validation_data=batches(3), epochs=2, verbose=0)
    loop = loop_on(replicas)
    history = loop.fit(batches(size), batches(3), epochs=2, verbose=0)
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-6)
    for ours, theirs in zip(loop.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_step_is_the_one_worked_by_hand(replicas):
    x = np.array([[1.0], [2.0], [3.0]], "float32")
    weights = np.array([1.0, 0.0, 2.0], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x, weights)).batch(3)
    loop = loop_on(
        replicas,
        lambda: slope(kernel_regularizer=keras.regularizers.L1(0.5)),
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        metrics=(),
    )
    history = loop.fit(data, epochs=1, verbose=0)
    # Losses 4, 16 and 36, weighted 4 + 0 + 72, over three rows.
    assert history.history["loss"] == [pytest.approx(76 / 3)]
    # d/dw is -4 x^2: (4 + 0 + 2 * 36) / 3 of it; 0.5 |w| has the slope 0 at 0, and 0.5 on JAX.
    assert weight_of(loop) == pytest.approx(0.1 * (76 / 3 - 0.5 * ON_JAX))
    # And now it has one, and counts once: 0.5 |w|.
    w = weight_of(loop)
    assert loop.evaluate(data, verbose=0) == {
        "loss": pytest.approx(((2 - w) ** 2 * (1 + 18)) / 3 + 0.5 * w, rel=1e-5)
    }


def test_gradients_are_summed_before_they_are_clipped():
    def optimizer():
        return keras.optimizers.SGD(0.5, global_clipnorm=0.01)

    assert_same(trained(1, optimizer=optimizer()), trained(3, optimizer=optimizer()), 1e-7)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"accumulation": 2}, marks=pytest.mark.slow)]
)
def test_losses_under_a_mask_are_divided_by_the_unmasked_entries_of_all_replicas(settings):
    def build():
        initializer = keras.initializers.GlorotUniform(seed=1)
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(5, 4, mask_zero=True, embeddings_initializer=initializer),
                layers.Dense(5, kernel_initializer=initializer, kernel_regularizer="l2"),
            ]
        )

    tokens = np.array([[1, 2, 3], [4, 0, 0], [1, 0, 0], [2, 3, 0]], "int32")
    data = tf.data.Dataset.from_tensor_slices((tokens, tokens)).batch(4)
    assert_same(
        trained(1, data, build=build, metrics=()),
        trained(3, data, build=build, metrics=(), **settings),
    )


def test_the_losses_of_several_outputs_are_logged_and_add_up():
    def build():
        inputs = keras.Input((4,))
        initializer = keras.initializers.GlorotUniform(seed=1)
        outputs = {
            name: layers.Dense(size, name=name, kernel_initializer=initializer)(inputs)
            for name, size in (("kind", 3), ("size", 1))
        }
        return keras.Model(inputs, outputs)

    x, y = testing.toy_classification(7)
    data = tf.data.Dataset.from_tensor_slices((x, {"kind": y, "size": x[:, :1]})).batch(4)
    settings = {
        "build": build,
        "loss": {"kind": crossentropy(), "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    }
    one, two = trained(1, data, **settings), trained(2, data, **settings)
    assert_same(one, two)
    history = one[1]
    assert set(history) == {"loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae"}
    total = np.array(history["kind_loss"]) + 0.3 * np.array(history["size_loss"])
    np.testing.assert_allclose(history["loss"], total, rtol=1e-5)


def test_replicas_drop_other_units_and_a_seed_repeats_them():
    def build():
        return keras.Sequential(
            [
                keras.Input((100,)),
                layers.Dropout(0.5, seed=3),
                layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )

    class Prediction(TrainingLoop):
        def per_example_loss(self, x, y, *, training):  # noqa: ARG002 a method's arguments
            predictions = self.model(x, training=training)
            return predictions[:, 0], predictions

    data = tf.data.Dataset.from_tensors(np.ones((2, 100), "float32"))
    runs = [
        trained(2, data, 1, build=build, loop=Prediction, loss=None, metrics=(), optimizer="sgd")
        for _ in range(2)
    ]
    assert_same(*runs)
    moves = runs[0][0].model.get_weights()[0]
    assert len(np.unique(moves.round(5))) == 3  # dropped by both replicas, by one, by none


@pytest.mark.slow
def test_a_float16_model_gets_its_loss_scaled():
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return testing.tiny_classifier()
        finally:
            keras.config.set_dtype_policy("float32")

    one, two = trained(1, build=build), trained(2, build=build)
    assert isinstance(two[0].optimizer, keras.optimizers.LossScaleOptimizer)
    assert one[1]["loss"] == pytest.approx(two[1]["loss"], rel=1e-2)


# The ways to run a step.


@pytest.mark.slow
def test_many_steps_in_a_call_train_the_same_and_compile_once():
    traces = []

    class Counting(TrainingLoop):
        def per_example_loss(self, x, y, *, training):
            traces.append(training)
            return super().per_example_loss(x, y, training=training)

    ends = []
    data = batches(2, 13).repeat(2)  # 14 batches: calls of 4, 4, 4 and 2
    many = loop_on(2, loop=Counting, steps_per_loop=4)
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: ends.append((batch, len(logs or {}))),
        on_train_batch_end=lambda batch, logs: ends.append((batch, len(logs))),
    )
    history = many.fit(data, epochs=2, callbacks=watch, verbose=0).history
    assert ends[:8] == [(0, 0), (3, 2), (4, 0), (7, 2), (8, 0), (11, 2), (12, 0), (13, 2)]
    # On JAX once for each length of a call, of which a scan takes the types first; on TensorFlow
    # once for each replica.
    assert traces.count(True) == (4 if ON_JAX else 2)
    assert steps_of(many) == 28
    assert_same((many, history), trained(2, data))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"accumulation": 3}, {"jit": True}, {"jit": False}])
def test_micro_batches_and_xla_train_the_same(settings):
    weights = np.arange(11, dtype="float32")
    data = batches(5, 11, weights)  # pieces of 3 and 2, and a last batch of one row
    plain, other = trained(1, data), trained(2, data, **settings)
    assert_same(plain, other)
    assert steps_of(other[0]) == steps_of(plain[0]) == 6


@pytest.mark.slow
def test_micro_batches_of_one_row_train_the_same():
    one = trained(1, optimizer=keras.optimizers.SGD(0.5))
    assert_same(one, trained(4, optimizer=keras.optimizers.SGD(0.5), accumulation=4))


RANDOM = {
    "noise": lambda: [layers.GaussianNoise(0.3), layers.GaussianDropout(0.2)],
    "dropout": lambda: [layers.Dropout(0.3), layers.AlphaDropout(0.2)],
    "channels": lambda: [
        layers.Reshape((2, 4)),
        layers.SpatialDropout1D(0.4),
        layers.Dropout(0.3, noise_shape=(None, 2, 1)),
        layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
    ],
}


@pytest.mark.jax  # on TensorFlow test_random.py has it
@pytest.mark.parametrize(
    ("replicas", "accumulation"),
    [
        (3, 5),
        *(pytest.param(*values, marks=pytest.mark.exhaustive) for values in [(1, 4), (2, 2)]),
    ],
)
@pytest.mark.parametrize("name", RANDOM)
def test_micro_batches_draw_what_the_batch_draws(name, replicas, accumulation):
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8), *RANDOM[name](), layers.Dense(3)]
        )

    settings = {"build": build, "data": batches(8, 19), "optimizer": "sgd"}
    assert_same(trained(1, **settings), trained(replicas, accumulation=accumulation, **settings))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_xla_is_tried_while_training_goes_on_and_trial_and_choice_are_said_once(capsys):
    data = batches(4, 48).repeat()
    tried = loop_on(2, jit="measure", steps_per_loop=12)
    plain = loop_on(1, jit=False)
    while not tried._steps._trial.verdict:
        one, other = (
            (loop, loop.fit(data, epochs=1, steps_per_epoch=12, verbose=0).history)
            for loop in (tried, plain)
        )
        assert_same(one, other, tolerance=1e-4)
    tried.fit(data, epochs=1, steps_per_epoch=24, verbose=0)
    said = re.findall(r"XLA: (.+?),", capsys.readouterr().out)
    trial = "the first steps run with and without it"
    assert said == [trial, "on" if tried._steps.jit else "off"]


@pytest.mark.skipif(not ON_JAX, reason="on TensorFlow XLA is tried")
def test_on_jax_measuring_means_compiling(capsys):
    loop = loop_on(1, jit="measure")
    loop.fit(batches(), epochs=1, verbose=0)
    assert loop._steps.jit is True
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_micro_batches_of_sparse_gradients_train_the_same():
    def build():
        initializer = keras.initializers.GlorotUniform(seed=1)
        embedding = layers.Embedding(9, 4, embeddings_initializer=initializer)
        head = layers.Dense(3, kernel_initializer=initializer)
        return keras.Sequential(
            [keras.Input((6,), dtype="int32"), embedding, layers.GlobalAveragePooling1D(), head]
        )

    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 9, (10, 6)), random.integers(0, 3, 10)
    data = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(4)
    assert_same(trained(1, data, build=build), trained(2, data, build=build, accumulation=2))


@pytest.mark.tensorflow
@pytest.mark.parametrize(("wanted", "used"), [(None, False), (True, True), (False, False)])
def test_tf_data_tunes_a_dataset_only_if_it_says_so(wanted, used):
    options = tf.data.Options()
    if wanted is not None:
        options.autotune.enabled = wanted
    loop = loop_on(1)
    feed = loop._steps.open(batches(4).with_options(options), "train", steps_per_epoch=None)
    assert feed.batches.options().autotune.enabled is used


# What a user may change.


class Adversarial(TrainingLoop):
    """Trains on rows moved against the model, by the sign of the gradient of the loss."""

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


class Distilled(TrainingLoop):
    """Learns a teacher's answers besides the labels."""

    def __init__(self, model, *, teacher, **settings):
        super().__init__(model, **settings)
        self.teacher = teacher

    def per_example_loss(self, x, y, *, training):
        losses, predictions = super().per_example_loss(x, y, training=training)
        wanted, got = (keras.ops.softmax(each) for each in (self.teacher(x), predictions))
        return losses + keras.losses.kl_divergence(wanted, got), predictions


def test_an_adversarial_step_is_the_same_on_replicas():
    one, two = (trained(replicas, loop=Adversarial) for replicas in (1, 2))
    assert_same(one, two)
    assert one[1]["loss"][0] > trained(1)[1]["loss"][0]


@pytest.mark.slow
def test_a_distillation_step_is_the_same_on_replicas():
    teacher = testing.tiny_classifier(seed=5)
    one, two = (trained(replicas, loop=Distilled, teacher=teacher) for replicas in (1, 2))
    assert_same(one, two)
    assert one[1]["loss"][0] > trained(1)[1]["loss"][0]


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


def test_callbacks_are_called_as_by_keras_fit():
    model = testing.tiny_classifier()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    theirs, ours = Recorder(), Recorder()
    model.fit(batches(), validation_data=batches(3), epochs=2, verbose=0, callbacks=[theirs])
    loop_on(2).fit(batches(), batches(3), epochs=2, verbose=0, callbacks=[ours])
    assert len(ours.calls) == len(theirs.calls) == 2 + 2 * (2 + 2 * 3 + 2 + 2 * 4)
    for (name, *arguments), (other_name, *other_arguments) in zip(
        ours.calls, theirs.calls, strict=True
    ):
        assert name == other_name
        for mine, other in zip(arguments, other_arguments, strict=True):
            assert mine == (pytest.approx(other, rel=1e-5) if isinstance(other, dict) else other)


def test_stopping_early_and_rates_on_a_plateau_work_as_in_fit():
    def watchers():
        return [
            keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
            callbacks.LearningRateLogger(),
        ]

    settings = {"optimizer": keras.optimizers.SGD(30.0)}
    model = testing.tiny_classifier()
    model.compile(keras.optimizers.SGD(30.0), crossentropy())
    expected = model.fit(batches(), epochs=9, verbose=0, callbacks=watchers())
    loop = loop_on(1, metrics=(), **settings)
    history = loop.fit(batches(), epochs=9, verbose=0, callbacks=watchers())
    assert len(expected.history["loss"]) < 9
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-5)


def test_the_progress_lines_are_those_of_keras(capsys):
    loop_on(1).fit(batches(), batches(), epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 1/2"
    shown = re.fullmatch(r"3/3 - \S+ - \S+ - (.*)", lines[1])[1]
    assert re.sub(r": [\d.]+", "", shown) == "accuracy - loss - val_accuracy - val_loss"


# Evaluation and prediction.


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_evaluation_counts_every_row_once_and_predictions_keep_their_order(replicas):
    loop = loop_on(replicas, steps_per_loop=2)
    x, y = testing.toy_classification(9)
    logits = loop.predict(batches(4, 9), verbose=0)
    np.testing.assert_allclose(logits, loop.model(x), atol=1e-6)
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    assert loop.evaluate(batches(4, 9), verbose=0) == {
        "loss": pytest.approx(float(np.mean(losses)), rel=1e-5),
        "accuracy": pytest.approx(float(np.mean(np.argmax(logits, 1) == y))),
    }


def test_predictions_keep_the_structure_of_the_outputs():
    inputs = keras.Input((4,))
    outputs = {"double": inputs * 2, "pair": [inputs[:, 0], inputs + 1]}
    loop = loop_on(2, lambda: keras.Model(inputs, outputs), metrics=())
    x, _ = testing.toy_classification(5)
    predicted = loop.predict(tf.data.Dataset.from_tensor_slices(x).batch(3), verbose=0)
    np.testing.assert_array_equal(predicted["double"], 2 * x)
    np.testing.assert_array_equal(predicted["pair"][0], x[:, 0])
    np.testing.assert_array_equal(predicted["pair"][1], x + 1)


# How much of a dataset.


def test_an_epoch_of_some_steps_goes_on_where_the_last_one_stopped():
    loop = loop_on(1)
    loop.fit(batches(2, 8), epochs=3, steps_per_epoch=2, verbose=0)  # the third begins anew
    assert steps_of(loop) == 6
    with pytest.raises(ValueError, match=r"`train` ended after 1 of the 3 steps of an epoch"):
        loop.fit(batches(2, 8), epochs=2, steps_per_epoch=3, verbose=0)


@pytest.mark.slow
def test_a_dataset_of_unknown_length_is_trained_on_to_its_end():
    data = batches(2, 10).filter(lambda x, y: True)  # noqa: ARG005 a predicate's arguments
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    loop = loop_on(2, steps_per_loop=2)
    loop.fit(data, data, epochs=2, verbose=0)
    assert steps_of(loop) == 10


def test_training_begins_with_the_epoch_that_is_asked_for():
    history = loop_on(1).fit(batches(), epochs=5, initial_epoch=3, verbose=0)
    assert history.epoch == [3, 4]


# Checkpoints.


def with_batch_norm():
    initializer = keras.initializers.GlorotUniform(seed=2)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, use_bias=False, kernel_initializer=initializer),
            layers.BatchNormalization(synchronized=not ON_JAX),
            layers.Dense(3, kernel_initializer=initializer),
        ]
    )


def continued(loop):
    history = loop.fit(batches(), epochs=1, verbose=0).history
    return loop, history


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train on two replicas, save in both formats, and train on."""
    directory = tmp_path_factory.mktemp("saved")
    loop, _ = trained(2, build=with_batch_norm)
    loop.model.save(directory / "model.keras")
    if not ON_JAX:
        tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer).write(f"{directory}/state")
    predictions = loop.predict(batches(), verbose=0)
    return directory, predictions, continued(loop)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "kind", ["keras", pytest.param("checkpoint", marks=pytest.mark.tensorflow)]
)
def test_a_checkpoint_of_two_replicas_trains_on_at_any_count(saved, kind, replicas):
    directory, predictions, expected = saved
    if kind == "keras":
        with scope_of(strategy_of(replicas)):
            model = keras.models.load_model(directory / "model.keras")
        loop = TrainingLoop(
            model, optimizer=model.optimizer, loss=crossentropy(), metrics=["accuracy"]
        )
    else:
        loop = loop_on(replicas, with_batch_norm)
        state = tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer)
        state.read(f"{directory}/state")
    np.testing.assert_allclose(loop.predict(batches(), verbose=0), predictions, atol=1e-6)
    assert_same(continued(loop), expected)


def test_the_model_stays_of_its_class():
    loop = loop_on(1)
    assert type(loop.model) is keras.Sequential
    assert loop.model.optimizer is loop.optimizer


# What cannot be.


class OwnStep(keras.Sequential):
    """A model whose step is its own."""

    def train_step(self, data):
        return super().train_step(data)


def test_a_step_of_the_models_own_raises_unless_the_loop_says_what_to_compute():
    def build():
        return OwnStep(testing.tiny_classifier().layers)

    with pytest.raises(ValueError, match=r"`train_step` of its own.*Received: model='OwnStep'"):
        trained(2, build=build)
    assert_same(trained(2, build=build, loop=Adversarial), trained(1, loop=Adversarial))


def scalar_loss(y, prediction):
    return keras.ops.mean(keras.ops.square(prediction - y[:, None]))


class ByColumn(TrainingLoop):
    """Takes a mean over the rows instead of over the columns."""

    def per_example_loss(self, x, y, *, training):  # noqa: ARG002 a method's arguments
        predictions = self.model(x, training=training)
        return keras.ops.mean(predictions, axis=0), predictions


class WithoutPredictions(TrainingLoop):
    """Forgets what the metrics are to see."""

    def per_example_loss(self, x, y, *, training):
        del y
        return keras.ops.mean(self.model(x, training=training), axis=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps_per_loop": 0}, "`steps_per_loop` must be a positive integer.*Received: steps_per"),
        ({"accumulation": 1.5}, "`accumulation` must be a positive integer.*1.5"),
        ({"optimizer": None}, "no optimizer to train with"),
        ({"jit": "yes"}, "`jit` must be True, False, 'measure' or None.*'yes'"),
        ({"loss": None}, "no loss to train with.*Received: loss=None"),
        ({"strategy": "mirrored"}, "strategy.* Received: strategy='mirrored'"),
    ],
)
def test_impossible_settings_raise(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainingLoop(
            testing.tiny_classifier(), **{"optimizer": "sgd", "loss": crossentropy()} | settings
        )


@pytest.mark.tensorflow
def test_a_model_of_another_scope_raises():
    with pytest.raises(
        ValueError, match="The model was made outside the strategy's scope.*Mirrored"
    ):
        TrainingLoop(
            testing.tiny_classifier(),
            optimizer="sgd",
            loss=crossentropy(),
            strategy=strategy_of(2),
        )
    with pytest.raises(ValueError, match="must be a Keras model"):
        TrainingLoop(lambda x: x, optimizer="sgd", loss=crossentropy())


@pytest.mark.tensorflow
def test_an_optimizer_of_other_variables_raises():
    optimizer = keras.optimizers.Adam()
    optimizer.build(testing.tiny_classifier().trainable_variables)
    with pytest.raises(ValueError, match="originally built with"):
        trained(2, optimizer=optimizer)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (batches().unbatch(), "`train` gives single examples.*batch"),
        (batches().take(0), "`train` gave no batch"),
        (batches().repeat(), "`train` never ends.*`steps_per_epoch`"),
        (batches().map(lambda x, _: x), "computed from labels"),
        (
            batches().map(lambda x, y: (x, {"a": y, "b": y})),
            r"`labels` must have one entry.*outputs=1, labels={'a': \(13,\), 'b': \(13,\)}",
        ),
        (np.ones((4, 4)), "`train` must .* batches, and is a ndarray"),
    ],
)
def test_datasets_that_cannot_be_trained_on_raise(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        trained(1, data)


def two_outputs():
    inputs = keras.Input((4,))
    return keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in ("b", "a")})


@pytest.mark.parametrize(
    ("settings", "received"),
    [
        ({"loss": {"a": "mse", "typo": "mse"}}, "typo"),
        ({"loss": ["mse"]}, r"loss=\['mse'\]"),
        ({"loss": []}, r"loss=\[\]"),
        ({"loss": "mse", "loss_weights": [1, 2, 3]}, r"loss_weights=\[1, 2, 3\]"),
        ({"loss": "mse", "loss_weights": {"a": 1, "typo": 0.1}}, "typo"),
        ({"loss": "mse", "loss_weights": 0.5}, "loss_weights=0.5"),
        ({"loss": "mse", "one label": True}, r"labels=\(13, 1\)"),
        ({"loss": ["mse", "mse"], "build": testing.tiny_classifier}, "outputs=1, loss="),
    ],
)
def test_settings_that_do_not_match_the_outputs_raise(settings, received):
    settings = dict(settings)
    x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
    labels = y if settings.pop("one label", False) else {"a": y, "b": y}
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(2)
    with pytest.raises(ValueError, match=f"one entry for each output.*Received.*{received}"):
        trained(1, data, metrics=(), **{"build": two_outputs} | settings)


def test_a_list_of_losses_follows_the_order_of_keras():
    x, _ = testing.toy_classification(10)
    data = tf.data.Dataset.from_tensor_slices((x, {"a": x[:, :1], "b": x[:, 1:2]})).batch(4)

    def build():
        keras.utils.set_random_seed(1)
        return two_outputs()

    model, losses = build(), ["mse", "mae"]
    model.compile("sgd", losses, loss_weights=[1.0, 0.2])
    model.fit(data, verbose=0)
    loop, _ = trained(
        1, data, 1, build=build, optimizer="sgd", loss=losses, loss_weights=[1.0, 0.2], metrics=()
    )
    for ours, theirs in zip(loop.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"loss": keras.losses.Circle(), "accumulation": 2},
            r"examples of a batch with each other.*Received: loss='circle'.*accumulation=1",
        ),
        (
            {"loss": scalar_loss, "accumulation": 2},
            r"examples of a batch with each other.*Received: loss='scalar_loss'",
        ),
        (
            {"loop": ByColumn},
            r"a loss for each example.*Received: losses_shape=\(3,\), num_examples=13",
        ),
        (
            {"loop": WithoutPredictions},
            r"must return `\(losses, predictions\)`.*Received: returned='",
        ),
        pytest.param(
            {"build": with_batch_norm, "accumulation": 2},
            "BatchNormalization cannot meet.*accumulation=2",
            marks=pytest.mark.tensorflow,
        ),
        pytest.param(
            {"build": with_batch_norm, "jit": True},
            'BatchNormalization cannot meet.*jit=True.*batch_norm="replica"',
            marks=pytest.mark.tensorflow,
        ),
    ],
)
def test_steps_that_cannot_be_exact_raise(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        trained(2, **settings)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_batch_normalization_by_replica_is_warned_about_and_stays_finite(accumulation):
    def build():
        return keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])

    with pytest.warns(UserWarning, match="normalizes by each replica's own examples"):
        loop, history = trained(4, build=build, accumulation=accumulation, batch_norm="replica")
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in loop.model.get_weights())
    for statistics in loop.model.non_trainable_variables:
        first, *others = loop.strategy.experimental_local_results(statistics.value)
        for other in others:  # the last replicas had no rows in the last batch
            np.testing.assert_array_equal(first, other)


# What layers and metrics keep.


class Centered(layers.Layer):
    """Subtracts a moving mean that it keeps itself."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        outputs = inputs - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(inputs, axis=0))
        return outputs


def with_centered():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), Centered(), layers.Dense(3)])


def mean_size(_, predictions):
    return keras.ops.mean(keras.ops.abs(predictions))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("train", ["fit", "loop"])
def test_moving_state_and_scalar_metrics_are_those_of_the_global_batch(train, replicas):
    data = batches(12, 13)  # one row last: replicas without examples
    one = with_centered()
    one.compile("sgd", crossentropy(), metrics=[mean_size])
    expected = one.fit(data, epochs=2, verbose=0).history
    if train == "loop" or ON_JAX:
        loop, history = trained(
            replicas, data, build=with_centered, optimizer="sgd", metrics=[mean_size]
        )
        model = loop.model
    else:
        with scope_of(strategy_of(replicas)):
            model = with_centered()
        model.compile("sgd", crossentropy(), metrics=[mean_size])
        history = kdpkit.training.replica_exact(model).fit(data, epochs=2, verbose=0).history
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-5), name
    for ours, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_evaluation_gives_metrics_of_several_numbers():
    x, y = testing.toy_classification(10)
    data = tf.data.Dataset.from_tensor_slices((x, np.eye(3)[y])).batch(4)
    loop = loop_on(2, loss="mse", metrics=[keras.metrics.F1Score()])
    assert loop.evaluate(data, verbose=0)["f1_score"].shape == (3,)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_micro_batches_of_sparse_features_train_the_same():
    x, y = testing.toy_classification(10)
    dense = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    sparse = dense.map(lambda x, y: (tf.sparse.from_dense(x), y))

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(3)])

    assert_same(trained(1, sparse, build=build), trained(2, sparse, build=build, accumulation=2))


@pytest.mark.tensorflow
def test_a_layer_with_a_state_for_each_row_raises():
    def build():
        return keras.Sequential(
            [keras.Input((6, 1), batch_size=4), layers.LSTM(2, stateful=True), layers.Dense(3)]
        )

    x = np.ones((8, 6, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(8))).batch(4, drop_remainder=True)
    with pytest.raises(ValueError, match="goes on from a state for each example.*layer='lstm'"):
        trained(2, data, build=build)


@pytest.mark.tensorflow
def test_the_buffers_that_feed_replicas_are_not_tuned(monkeypatch):
    from kdpkit.training.tensorflow import _patches

    made = []
    untuned = _patches.untuned
    monkeypatch.setattr(
        _patches, "untuned", lambda dataset: made.append(untuned(dataset)) or made[-1]
    )
    trained(2, epochs=2)
    assert len(made) == 4  # of two replicas in two epochs
    assert not any(dataset.options().autotune.enabled for dataset in made)


def embedding_classifier():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


OPTIMIZERS = {
    "AdamW": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "SGD, clipped, averaged": lambda: keras.optimizers.SGD(
        0.2, momentum=0.9, global_clipnorm=0.05, use_ema=True, ema_momentum=0.5
    ),
    "accumulating": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01)),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_that_xla_compiles_are_those_without_it(name, replicas):
    words = np.random.default_rng(0).integers(0, 9, (10, 6))
    data = tf.data.Dataset.from_tensor_slices((words, np.arange(10) % 3)).batch(4)
    plain, history = trained(
        1, data, build=embedding_classifier, optimizer=OPTIMIZERS[name](), jit=False
    )
    compiled, ours = trained(
        replicas, data, build=embedding_classifier, optimizer=OPTIMIZERS[name](), jit=True
    )
    for one, other in zip(plain.model.get_weights(), compiled.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert ours["loss"] == pytest.approx(history["loss"], rel=1e-5)
    assert int(compiled.optimizer.iterations) == int(plain.optimizer.iterations)


class Counted(keras.optimizers.schedules.LearningRateSchedule):
    """Falls from step to step, and counts how often it is asked."""

    calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.1 / (1 + keras.ops.cast(step, "float32"))


@pytest.mark.sampled(2)
@pytest.mark.tensorflow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda inner: inner, id="plain"),
        pytest.param(keras.optimizers.LossScaleOptimizer, id="scaled", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_is_asked_once_a_step_and_trains_what_fit_trains(made, replicas, jit):
    def decaying(schedule):
        return made(keras.optimizers.AdamW(schedule, weight_decay=0.1))

    schedule = Counted()
    strategy = strategy_of(replicas)
    with scope_of(strategy):
        settings = {"optimizer": decaying(schedule), "loss": crossentropy(), "jit": jit}
        loop = TrainingLoop(testing.tiny_classifier(), strategy=strategy, **settings)
    loop.fit(batches(), epochs=2, verbose=0)
    assert schedule.calls == 1  # for six steps of four weights each, that are traced once
    keras.utils.set_random_seed(0)
    model = testing.tiny_classifier()
    model.compile(decaying(Counted()), crossentropy())
    model.fit(batches(), epochs=2, verbose=0)
    for one, other in zip(loop.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class RateOfEach(keras.optimizers.SGD):
    """Halves the rate with every variable, which it asks for itself."""

    asked = 0

    def _get_current_learning_rate(self):
        return super()._get_current_learning_rate() * 0.5**self.asked

    def update_step(self, gradient, variable, learning_rate):  # noqa: ARG002
        self.asked = self._get_variable_index(variable)
        super().update_step(gradient, variable, self.learning_rate)
        self.asked = 0


class TwoRates(keras.optimizers.SGD):
    """Trains the last two variables at a tenth of the rate, which it sets."""

    def apply(self, gradients, trainable_variables=None):
        variables = [*trainable_variables]
        schedule = self._learning_rate
        super().apply(gradients[:-2], variables[:-2])
        self._iterations.assign_sub(1)
        self.learning_rate = lambda: 0.1 * schedule(self._iterations)
        super().apply(gradients[-2:], variables[-2:])
        self.learning_rate = schedule


class Named(keras.optimizers.SGD):
    """Has an attribute of the name that `LossScaleOptimizer` gives what it wraps."""

    inner_optimizer = None


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", [RateOfEach, TwoRates, Named])
def test_an_optimizer_that_asks_for_other_rates_gets_them(kind):
    def train_with(optimizer):
        keras.utils.set_random_seed(0)
        model = testing.tiny_classifier()
        optimizer.build(model.trainable_variables)
        return model, optimizer

    model, optimizer = train_with(kind(Counted()))
    model.compile(optimizer, crossentropy())
    model.fit(batches(), epochs=2, verbose=0)
    ours, optimizer = train_with(kind(Counted()))
    loop = TrainingLoop(ours, optimizer=optimizer, loss=crossentropy(), jit=False)
    loop.fit(batches(), epochs=2, verbose=0)
    for one, other in zip(ours.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class Looked(TrainingLoop):
    """Looks at the numbers of a batch, as one does to find a mistake."""

    def per_example_loss(self, x, y, *, training):
        assert not training or np.isfinite(x.numpy()).all()
        return super().per_example_loss(x, y, training=training)


@pytest.mark.tensorflow
def test_functions_that_run_eagerly_are_not_traced():
    loop = loop_on(1, loop=Looked, jit=False)
    tf.config.run_functions_eagerly(True)
    try:
        losses = loop.fit(batches(), epochs=1, verbose=0).history["loss"]
    finally:
        tf.config.run_functions_eagerly(False)
    assert losses == pytest.approx(trained(1, epochs=1)[1]["loss"])


class Collecting(TrainingLoop):
    """Notes whether Python collects garbage while a step is traced."""

    def per_example_loss(self, x, y, *, training):
        if training:
            self.collects = gc.isenabled()
        return super().per_example_loss(x, y, training=training)


@pytest.mark.tensorflow
def test_nothing_is_collected_while_a_step_is_traced_and_garbage_is_afterwards():
    loop, _ = trained(1, loop=Collecting, epochs=1, jit=False)
    assert not loop.collects
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.tensorflow
def test_xla_compiles_the_update_under_a_strategy_of_one_replica_too():
    words = np.random.default_rng(0).integers(0, 9, (10, 6))
    data = tf.data.Dataset.from_tensor_slices((words, np.arange(10) % 3)).batch(4)

    def weights(strategy, jit):
        with strategy.scope():
            model = embedding_classifier()
        loop = TrainingLoop(
            model, optimizer="adamw", loss=crossentropy(), strategy=strategy, jit=jit
        )
        loop.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    expected = weights(strategies.select_strategy("one"), jit=False)
    mirrored = strategies.select_strategy("mirrored", devices=["CPU:1"])
    for one, other in zip(weights(mirrored, jit=True), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow
def test_xla_compiles_the_updates_of_an_optimizer_that_was_made_in_the_scope():
    def weights(make_in_scope):
        strategy = strategy_of(2)
        optimizer = keras.optimizers.AdamW(0.05)
        with strategy.scope():
            model = embedding_classifier()
            optimizer = keras.optimizers.AdamW(0.05) if make_in_scope else optimizer
        loop = TrainingLoop(model, optimizer=optimizer, loss=crossentropy(), jit=True)
        words = np.random.default_rng(0).integers(0, 9, (10, 6))
        data = tf.data.Dataset.from_tensor_slices((words, np.arange(10) % 3)).batch(4)
        loop.fit(data, epochs=2, verbose=0)
        assert loop._steps._may_compile_updates is make_in_scope
        return model.get_weights()

    for one, other in zip(weights(True), weights(False), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_what_changed_since_the_first_fit_raises():
    loop, _ = trained(1, epochs=1)
    weights = loop.model.get_weights()
    loop.model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"Other weights are trainable.*then=4, now=2.*new loop"):
        loop.fit(batches(), epochs=1, verbose=0)
    loop.model.layers[0].trainable = True
    loop.model.compile(optimizer="sgd", loss=crossentropy())
    with pytest.raises(ValueError, match=r"compiled again.*Make a new loop"):
        loop.fit(batches(), epochs=1, verbose=0)
    for before, after in zip(weights, loop.model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit", [True, "measure"])
def test_an_operation_that_xla_does_not_have_is_named(jit):
    def through_python(x):
        return x + tf.ensure_shape(tf.numpy_function(np.square, [x], tf.float32), x.shape)

    def build():
        return keras.Sequential([keras.Input((4,)), layers.Lambda(through_python), layers.Dense(3)])

    loop = loop_on(1, build, jit=jit)
    with pytest.raises(ValueError, match="XLA cannot compile.*PyFunc.*Use `jit=False`"):
        loop.fit(batches(), epochs=1, verbose=0)
