"""A step that depends on how its batch is cut is not trained; others are, as if unverified."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import ops

from kdpkit import strategies, testing
from kdpkit.training import TrainingLoop, replica_exact
from kdpkit.training.tensorflow import _global_batch, _variables
from kdpkit.training.tensorflow._verification_report import Item, Kind
from tests.training import faults
from tests.training.programs import Program, hidden, outcomes

pytestmark = pytest.mark.tensorflow
MORE = [pytest.param(replicas, marks=pytest.mark.exhaustive) for replicas in (3, 4, 8)]
QUICK = (
    "a loss summed by hand",
    "a metric that counts calls",
)


def each(items, quick):
    return [
        pytest.param(item, id=item.name, marks=[] if item.name in quick else pytest.mark.slow)
        for item in items
    ]


def scope(replicas):
    return strategies.select_strategy("mirrored", devices=replicas).scope()


def state(model):
    optimizers = [model.optimizer] if model.optimizer else []
    owners = [*model.variables, *model.metrics_variables, *(o.iterations for o in optimizers)]
    return [np.array(variable.numpy()) for variable in owners]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("replicas", [2, *MORE])
@pytest.mark.parametrize("fault", each(faults.FAULTS, QUICK))
def test_a_planted_fault_is_named_before_the_first_step(fault, replicas, monkeypatch):
    monkeypatch.setattr(_global_batch, "DIVISIONS", ())  # which are right for most of them
    keras.utils.set_random_seed(0)
    with scope(replicas):
        model = replica_exact(fault.build())
    model.build((None, 6))
    before = state(model)
    with pytest.raises(ValueError, match="Received: ") as caught:
        model.fit(**fault.data())
    for words in fault.named:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(state(model)[: len(before)], before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("fault", each(faults.FAULTS, ()))
def test_a_planted_fault_is_trained_on_the_global_batch_or_named(fault, replicas, capfd):
    found = outcomes.outcome(Program(fault.name, fault.build, fault.data), replicas)
    if fault.name in faults.UNSHARED:
        assert found.verdict == "raises", found
    else:
        assert found.verdict == "equal", found
        assert "runs this step on the global batch" in capfd.readouterr().err


@pytest.mark.parametrize(
    "fault", each([f for f in faults.FAULTS if f.fixed], ["add_loss of a sum"])
)
def test_what_the_sentence_suggests_trains_as_one_device_does(fault):
    found = outcomes.outcome(Program(fault.name, fault.fixed, fault.data), 2)
    assert found.verdict == "equal", found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault", each([f for f in faults.FAULTS if "random" not in f.name], ["a loss summed by hand"])
)
def test_a_planted_fault_is_one(fault):
    """Without verification the replicas train, or log, something else than one device."""

    def trained(replicas):
        keras.utils.set_random_seed(0)
        if replicas:
            with scope(replicas):
                model = replica_exact(fault.build(), verify=False)
        else:
            model = fault.build()
        logs = model.fit(**fault.data()).history
        return [*model.get_weights(), *map(np.asarray, logs.values())]

    differences = [
        np.max(np.abs(one - two), initial=0)
        for one, two in zip(trained(None), trained(2), strict=True)
    ]
    assert not max(differences) <= 1e-5  # which NaN is not, either


# What is right is trained as if it had not been verified.


def dropout_and_statistics():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )


def compiled(model, optimizer="adam", **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    return model


def in_policy(policy):
    def build():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return compiled(dropout_and_statistics())
        finally:
            keras.config.set_dtype_policy(before)

    return build


RIGHT = {
    "dropout and batch statistics": lambda: compiled(dropout_and_statistics()),
    "mixed_bfloat16": in_policy("mixed_bfloat16"),
    "mixed_float16": in_policy("mixed_float16"),
    "three steps in a call": lambda: compiled(dropout_and_statistics(), steps_per_execution=3),
    "eager": lambda: compiled(dropout_and_statistics(), run_eagerly=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [2, *MORE])
@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_verified_training_is_bit_for_bit_the_one_without(name, replicas):
    def trained(verify):
        keras.utils.set_random_seed(0)
        with scope(replicas):
            model = replica_exact(RIGHT[name](), verify=verify)
        x, y = testing.toy_classification(17)
        data = (x, y)
        logs = model.fit(*data, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        return [*state(model), *map(np.asarray, logs.values())]

    assert_same(trained(True), trained(False))


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_every_batch_of_a_generator_is_trained_on_once(rows):
    x, y = testing.toy_classification(rows)
    taken = []

    def batches():
        for start in range(0, rows, 7):
            taken.append(start)
            yield x[start : start + 7], y[start : start + 7]

    with scope(2):
        model = replica_exact(compiled(testing.tiny_classifier()))
    model.fit(batches(), steps_per_epoch=-(-rows // 7), verbose=0)
    assert taken == [*range(0, rows, 7)]
    assert model.optimizer.iterations.numpy() == len(taken)


def typed():
    numbers = keras.Input((4,), name="numbers")
    flags = keras.Input((1,), dtype="bool", name="flags")
    words = keras.Input((), dtype="string", name="words")
    looked_up = layers.StringLookup(vocabulary=["0", "1", "2"])(words)
    hidden = layers.Dense(3)(numbers) * keras.ops.cast(flags, "float32")
    outputs = hidden + layers.Embedding(4, 3)(looked_up)
    return keras.Model({"numbers": numbers, "flags": flags, "words": words}, outputs)


@pytest.mark.slow
def test_bool_string_and_sparse_features_are_verified():
    x, y = testing.toy_classification(9)
    features = {"numbers": x, "flags": x[:, :1] > 0, "words": np.array([str(n) for n in y])}
    with scope(2):
        model = replica_exact(compiled(typed()))
    model.fit(tf.data.Dataset.from_tensor_slices((features, y)).batch(5), verbose=0)
    inputs = keras.Input((4,), sparse=True)
    with scope(2):
        model = replica_exact(compiled(keras.Model(inputs, layers.Dense(3)(inputs))))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    model.fit(dataset.map(lambda x, y: (tf.sparse.from_dense(x), y)), verbose=0)
    assert model.optimizer.iterations.numpy() == 2


class PerExample(TrainingLoop):
    def per_example_loss(self, x, y, *, training):
        logits = self.model(x, training=training)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return losses, logits


class Normalizing(PerExample):
    """Divides by the batch's mean, which each replica has its own of."""

    def per_example_loss(self, x, y, *, training):
        losses, logits = super().per_example_loss(x, y, training=training)
        return losses / keras.ops.mean(keras.ops.square(logits)), logits


@pytest.mark.slow
def test_a_loop_verifies_its_step_too():
    x, y = testing.toy_classification(17)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)

    def weights(kind, verify):
        keras.utils.set_random_seed(0)
        with scope(2):
            model = dropout_and_statistics()
        loop = kind(model, optimizer="adam", loss=None, verify=verify, steps_per_loop=2)
        history = loop.fit(data, epochs=2, verbose=0).history
        return [*state(model), *map(np.asarray, history.values())]

    assert_same(weights(PerExample, True), weights(PerExample, False))
    with pytest.raises(ValueError, match=r"gradient=.*gather_examples"):
        weights(Normalizing, True)


# Data that cannot be trained on.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data.batch(4).repeat(), "endless.*steps_per_epoch"),
        (lambda data: data, "single examples; batch it"),
        (lambda data: data.batch(4).take(0), "no batch"),
        (
            lambda data: data.batch(4).map(lambda x, y: (x, y[1:])),
            r"equally many examples.*Received: shapes=",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_are_named_in_a_sentence(change, sentence):
    with scope(2):
        model = replica_exact(compiled(testing.tiny_classifier()))
    before = state(model)
    data = tf.data.Dataset.from_tensor_slices(testing.toy_classification(9))
    with pytest.raises(ValueError, match=sentence):
        model.fit(change(data), verbose=0)
    assert_same(state(model)[: len(before)], before)


def test_examples_along_another_axis_are_named_in_a_sentence(monkeypatch):
    class Pairs(keras.Model):
        """Takes anchors and positives along the first axis, and examples along the second."""

        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(3)
            self.inner.build((None, 4))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                anchors, positives = self.inner(data[0]), self.inner(data[1])
                loss = keras.ops.mean(keras.ops.square(anchors - positives))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    monkeypatch.setattr(_global_batch, "DIVISIONS", ())
    with scope(2):
        model = replica_exact(Pairs())
        model.compile("sgd")
    pairs = np.random.default_rng(0).normal(size=(1, 2, 5, 4)).astype("float32")
    with pytest.raises(ValueError, match="first axis.*Received: shapes="):
        model.fit(tf.data.Dataset.from_tensor_slices(pairs), verbose=0)


class MakingWeights(keras.Model):
    """Has no `call`, so that its layer is built by the first step."""

    def __init__(self):
        super().__init__()
        self.late = layers.Dense(3, name="late")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self.late(x), True)
            loss = keras.ops.mean(losses)
        weights = self.late.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Scattering(MakingWeights):
    def __init__(self):
        super().__init__()
        self.late.build((None, 4))
        self.seen = tf.Variable(tf.zeros(3), trainable=False)

    def train_step(self, data):
        self.seen.scatter_nd_update([[0]], [1.0])
        return super().train_step(data)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (MakingWeights, r"makes the weights.*Received: layers=\['late'\].*build"),
        (Scattering, "method='scatter_nd_update'.*assign"),
    ],
)
def test_what_variables_of_replicas_cannot_is_named_in_a_sentence(make, sentence):
    with scope(2):
        model = replica_exact(make())
        model.compile("sgd")
    with pytest.raises(ValueError, match=sentence):
        model.fit(*testing.toy_classification(9), verbose=0)


class Unfinished(MakingWeights):
    def train_step(self, data):  # Keras'
        raise NotImplementedError("write this step")


def test_an_error_of_the_users_own_stays_as_it_is():
    with scope(2):
        model = replica_exact(Unfinished())
        model.compile("sgd")
    with pytest.raises(NotImplementedError, match="write this step"):
        model.fit(*testing.toy_classification(9), verbose=0)


class OverWeights(keras.Model):
    """Divides by the weights of the examples, where they have such."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
            if weights is not None:
                loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize("by_batches", [False, True])
def test_a_step_is_verified_again_for_batches_of_another_structure(by_batches):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(9, 4)).astype("float32"), random.integers(0, 3, 9)
    weights = random.uniform(0.1, 1, 9).astype("float32")

    def trained(model):
        model.compile(keras.optimizers.SGD(0.1))
        for more in ((), (weights,)):
            if by_batches:
                model.train_on_batch(x, y, *more)
            else:
                model.fit(x, y, 5, sample_weight=more[0] if more else None, shuffle=False)
        return model.get_weights()

    keras.utils.set_random_seed(0)
    one = trained(OverWeights())
    keras.utils.set_random_seed(0)
    with scope(2):
        model = replica_exact(OverWeights())
    for mine, wanted in zip(trained(model), one, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-6)


class OfStaticSize(OverWeights):
    def train_step(self, data):
        sum(range(data[0].shape[0]))
        return super().train_step(data)


class OfAtLeastOne(OverWeights):
    """Has its passes in a function, where replicas cannot meet, which fails without examples."""

    @tf.function
    def gradients_of(self, x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0])]):
            return tape.gradient(loss, self.trainable_weights)

    def train_step(self, data):
        self.optimizer.apply(self.gradients_of(*data), self.trainable_weights)
        return {"loss": tf.constant(0.0)}


@pytest.mark.parametrize(
    ("make", "replicas", "sentence"),
    [
        (
            OfStaticSize,
            2,
            r"how many examples a batch has.*Received: error=.*`ops.shape\(x\)\[0\]`",
        ),
        (OfAtLeastOne, 4, r"Received: examples_of_replicas=\[1, 1, 1, 0\].*at least 4 examples"),
    ],
)
def test_steps_that_need_a_size_or_examples_are_named_in_a_sentence(
    make, replicas, sentence, monkeypatch
):
    monkeypatch.setattr(_global_batch, "DIVISIONS", ())
    x, y = np.ones((3, 4), "float32"), np.arange(3)
    with scope(replicas):
        model = replica_exact(make())
        model.compile("sgd")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(3, drop_remainder=True)
    with pytest.raises(ValueError, match=sentence):
        model.fit(batches, verbose=0)


def test_what_may_depend_on_the_cut_later_is_said_where_the_global_batch_does_not_help(
    monkeypatch, capfd
):
    monkeypatch.setattr(_global_batch, "DIVISIONS", ())
    rarely = faults.step(change=lambda gradients: [tf.clip_by_norm(g, 1e3) for g in gradients])
    with scope(2):
        model = replica_exact(rarely())
    model.fit(**faults.FAULTS[0].data())
    said = capfd.readouterr().err
    assert "changes gradients" in said
    assert "do not show it" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        layers.Identity,
        hidden.Surprised,
        functools.partial(layers.Dense, 4, activity_regularizer="l2"),
    ],
    ids=["nothing", "surprised", "regularized"],
)
def test_a_loop_says_what_may_depend_on_the_cut_later(layer, capfd):
    x, y = testing.toy_classification(13)
    with scope(3):
        model = keras.Sequential([keras.Input(x.shape[1:]), layer(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loop = TrainingLoop(model, optimizer="sgd", loss=loss, metrics=["accuracy"], accumulation=2)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    for use in (functools.partial(loop.fit, epochs=1), loop.evaluate, loop.predict):
        use(batches, verbose=0)
        said = capfd.readouterr().err
        assert ("something other than one device" in said) == (layer is hidden.Surprised)


@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_evaluation_and_prediction_of_a_loop_are_verified(use):
    data = faults.FAULTS[0].data()
    with scope(2):
        model = faults.net(faults.OverTheBatch)()
    loop = TrainingLoop(model, optimizer="sgd", loss=model.loss)
    batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(7)
    with pytest.raises(ValueError, match="Received: "):
        getattr(loop, use)(batches, verbose=0)


@pytest.mark.slow
def test_evaluate_and_predict_are_verified_where_fit_was_not():
    over_the_batch = faults.net(faults.OverTheBatch)
    data = faults.FAULTS[0].data()
    keras.utils.set_random_seed(0)
    with scope(2):
        model = replica_exact(over_the_batch())
    logs = model.evaluate(data["x"], data["y"], batch_size=7, verbose=0)
    keras.utils.set_random_seed(0)
    assert logs == pytest.approx(
        faults.net(faults.OverTheBatch)().evaluate(data["x"], data["y"], batch_size=7, verbose=0),
        rel=1e-5,
    )
    keras.utils.set_random_seed(0)
    with scope(2):
        model = replica_exact(over_the_batch())
    predicted = model.predict(data["x"], batch_size=7, verbose=0)
    keras.utils.set_random_seed(0)
    expected = over_the_batch().predict(data["x"], batch_size=7, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_that_is_compiled_anew_is_verified_anew():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = faults.net()()
        model = replica_exact(model)
        model.fit(**faults.FAULTS[0].data())
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), lambda _, z: (z - keras.ops.mean(z, 0)) ** 2)
        model.fit(**faults.FAULTS[0].data())
        return model.get_weights()

    one = trained(strategies.select_strategy("one"))
    two = trained(strategies.select_strategy("mirrored", devices=2))
    for expected, weights in zip(one, two, strict=True):
        np.testing.assert_allclose(weights, expected, atol=1e-6)


@pytest.mark.parametrize("settings", [{"verify": "yes"}, {"batch_norm": "local"}])
def test_other_choices_are_named_in_a_sentence(settings):
    with pytest.raises(ValueError, match="must be one of"):
        replica_exact(testing.tiny_classifier(), **settings)


def _of_images():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2, seed=1),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("in_loop", [False, True], ids=["fit", "loop"])
def test_a_plain_model_is_trained_without_a_word(in_loop, capfd):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(10, 6, 6, 1)).astype("float32"), random.integers(0, 3, 10)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with scope(2):
        model = _of_images()
        optimizer = keras.optimizers.SGD(0.1)
    if in_loop:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loop = TrainingLoop(model, optimizer=optimizer, loss=loss)
        loop.fit(data, epochs=1, verbose=0)
    else:
        replica_exact(model).fit(data, verbose=0, shuffle=False)
    assert "kdpkit" not in capfd.readouterr().err


class CountsInPython(keras.Model):
    """Adds a term after many steps, which a Python function counts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def count(self):
        self.steps += 1
        return np.float32(self.steps > 100)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            is_on = tf.numpy_function(self.count, [], tf.float32)
            loss = self.compute_loss(y=y, y_pred=self(x)) + is_on * keras.ops.mean(self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_step_that_calls_python_is_reported(eager, capfd):
    x, y = np.ones((10, 3), "float32"), np.ones((10, 1), "float32")
    with scope(2):
        inputs = keras.Input((3,))
        model = CountsInPython(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    replica_exact(model).fit(x, y, batch_size=4, verbose=0, shuffle=False)
    said = capfd.readouterr().err
    assert said.count("The step calls Python") == 1
    assert "Keep it in a variable" in said


@pytest.mark.slow
def test_the_graphs_of_the_verification_are_freed():
    """Registered gradients keep their graph: docs/upstream/...custom_gradient_keeps_graphs.md."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(5, 6, 6, 1)).astype("float32"), random.integers(0, 3, 5)

    def left(verify):
        with scope(2):
            model = replica_exact(_of_images(), verify=verify)
        before = {*ops.gradient_registry.list()}
        model.fit(x, y, verbose=0)
        new = {*ops.gradient_registry.list()} - before
        return len([name for name in new if name.startswith("CustomGradient-")])

    assert left(verify=True) == left(verify=False) > 0


def spoil(model):
    """Leave a model as `Resume` does that restores a run whose loss was not finite."""
    for variable in model.variables:
        variable.assign(keras.ops.full(variable.shape, np.nan, variable.dtype))
    model.metrics[0].reset_state()
    model.metrics[0].update_state(np.nan)


@pytest.mark.slow
def test_a_model_that_is_not_finite_trains_as_on_one_device():
    x, y = testing.toy_classification(12)
    with scope(2):
        model = replica_exact(testing.tiny_classifier())
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spoils = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: spoil(model))
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[spoils])
    assert np.isnan(model.history.history["loss"])


@pytest.mark.parametrize(
    ("now", "before", "change"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0),
        ([np.nan, 2.0], [1.0, 2.0], np.inf),
        ([5, 2], [3, 2], 2.0),
        ([], [], 0.0),
    ],
)
def test_what_was_not_finite_has_no_change(now, before, change):
    now, before = np.array(now), np.array(before)
    assert _variables.largest_change(now, before) == change
    assert _variables.has_changed(now, before) == (change > 0)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ([65646.75, 1.0], [np.inf, 1.0], 142.75),  # a sum in float32, and one in float16
        ([np.inf], [np.inf], 0.0),
        ([-65000.0], [-np.inf], 504.0),
        ([-65000.0], [np.inf], 130504.0),
        ([1e6], [np.inf], np.inf),
        ([5.0], [np.inf], np.inf),
        ([np.nan], [65504.0], np.inf),
    ],
)
def test_what_overflows_in_float16_alone_is_rounded(one, other, difference):
    items = [Item("", Kind.GRADIENT, "", np.array(value)) for value in (one, other)]
    assert items[0].difference(items[1]) == items[1].difference(items[0]) == difference
