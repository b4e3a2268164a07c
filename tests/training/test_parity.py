import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import testing
from kdpkit.training import ParityReport, check_parity, replica_exact

X, Y = testing.toy_classification(8)


def batched(size, examples, **settings):
    parts = testing.toy_classification(examples, **settings)
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def builder(
    *middle,
    exact=False,
    make=keras.Sequential,
    loss=None,
    optimizer=keras.optimizers.SGD,
    rate=0.1,
    **settings,
):
    def build():
        inner = [keras.Input((4,)), keras.layers.Dense(6, "tanh"), *(layer() for layer in middle)]
        model = make([*inner, keras.layers.Dense(3)])
        model.compile(
            optimizer(rate, **settings), loss or crossentropy(), weighted_metrics=["accuracy"]
        )
        return replica_exact(model) if exact else model

    return build


class PlainMean(keras.Sequential):
    """The loss of a custom loop that nobody divides by the number of replicas."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):  # noqa: ARG002  # Keras' signature
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_mean(losses)


class DividedTwice(keras.Sequential):
    """The loss of a custom loop that divides again what Keras has divided."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss / tf.distribute.get_strategy().num_replicas_in_sync


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "data", "batch", "said"),
    [
        (builder(clipnorm=0.01), (X, Y), 0, "gradients by"),
        (
            builder(clipvalue=1e-3, optimizer=keras.optimizers.Adam),
            batched(8, 11),
            0,
            "gradients by",
        ),
        (builder(), batched(4, 11), 2, "gradients by"),
        (
            builder(loss=crossentropy(reduction="mean_with_sample_weight")),
            (X, Y, np.arange(8, dtype="float32")),
            0,
            "gradients by",
        ),
        (
            builder(keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5)),
            batched(8, 11),
            0,
            "gradients by",
        ),
    ],
)
def test_what_keras_gets_wrong_is_located(build, data, batch, said):
    report = check_parity(build, data, replicas=2)
    assert not report.equal
    assert report.batch == batch
    assert report.variable.endswith(("kernel", "bias", "gamma", "beta"))
    assert re.search(f"`{report.variable}`.*{said}", str(report))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "factor"), [(PlainMean, "R"), (DividedTwice, "1/R")])
def test_a_wrong_factor_is_measured_and_named(make, factor):
    report = check_parity(builder(make=make), testing.toy_classification(9), replicas=3)
    assert report.factor_name == factor
    assert report.factor == pytest.approx({"R": 3.0, "1/R": 1 / 3}[factor], rel=1e-4)
    assert f"({factor})" in str(report)


def wide_builder(optimizer, *, exact=True, lazy=False):
    """Build a network with ReLU, whose smallest gradients are rounding."""

    def build():
        front = [] if lazy else [keras.Input((64,))]
        inner = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        model = keras.Sequential([*front, *inner, keras.layers.Dense(10)])
        model.compile(keras.optimizers.get(optimizer), crossentropy())
        return replica_exact(model) if exact else model

    return build


def wide_batches(examples):
    return batched(16, examples, features=64, classes=10)


def settings(name, **config):
    return {"class_name": name, "config": config}


small_steps = pytest.mark.parametrize(
    "optimizer",
    [settings("SGD", learning_rate=1e-6), settings("AdamW", learning_rate=2e-5)],
    ids=lambda optimizer: optimizer["class_name"],
)


@pytest.mark.sampled(1)
@pytest.mark.slow
@small_steps
def test_rounding_that_an_optimizer_enlarges_is_no_difference(optimizer):
    report = check_parity(wide_builder(optimizer), wide_batches(64), replicas=2)
    assert report.equal, report
    assert (report.batch, report.variable) == (None, "")
    assert ("rounding" in str(report)) == (report.weights > 1e-5)


@pytest.mark.sampled(1)
@pytest.mark.slow
@small_steps
def test_rounding_hides_no_uneven_batch(optimizer):
    report = check_parity(wide_builder(optimizer, exact=False), wide_batches(39), replicas=2)
    assert report.batch == 2
    assert report.gradients > 0.01
    assert "gradients by" in str(report)


@pytest.mark.slow
def test_a_model_that_its_first_batch_builds_is_compared_too():
    build = wide_builder(settings("Adam", learning_rate=1e-3), lazy=True)
    report = check_parity(build, wide_batches(39), replicas=2)
    assert report.equal, report


class DividingOptimizer(keras.optimizers.SGD):
    """An optimizer that is wrong on replicas by itself."""

    def update_step(self, gradient, variable, learning_rate):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        super().update_step(gradient / replicas, variable, learning_rate)


@pytest.mark.slow
def test_an_optimizer_that_differs_on_equal_gradients_is_named():
    build = builder(exact=True, optimizer=DividingOptimizer)
    report = check_parity(build, (X, Y), replicas=2)
    assert not report.equal
    assert report.gradients is None
    assert "by the optimizer" in str(report)


class TwoOptimizers(keras.Model):
    """A model whose optimizers are not `model.optimizer`."""

    def __init__(self):
        super().__init__()
        self.body, self.head = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]) for _ in range(2)
        )
        self.for_body, self.for_head = keras.optimizers.SGD(1e-5), keras.optimizers.SGD(1e-4)
        self.mean = crossentropy()

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = self.mean(data[1], self.head(self.body(data[0])))
        for optimizer, part in ((self.for_body, self.body), (self.for_head, self.head)):
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_gradients_of_several_optimizers_are_compared():
    def build():
        model = replica_exact(TwoOptimizers())
        model.compile()
        return model

    report = check_parity(build, testing.toy_classification(7), replicas=2)
    assert report.equal, report


@pytest.mark.slow
def test_an_uneven_first_batch_is_a_finding():
    report = check_parity(builder(), testing.toy_classification(9), replicas=2)
    assert not report.equal
    assert isinstance(report.error, tf.errors.InvalidArgumentError)
    assert "AddN" in str(report)


def test_what_the_run_on_replicas_raises_is_a_finding():
    def build():
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise LookupError("no such thing\nand more")
        return builder()()

    report = check_parity(build, (X, Y), replicas=2)
    assert not report.equal
    assert isinstance(report.error, LookupError)
    assert str(report).endswith("LookupError: no such thing.")


def test_what_one_device_raises_passes_through():
    def build():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        check_parity(build, (X, Y), replicas=2)


def test_weights_of_none_are_left_out():
    assert check_parity(builder(), (X, Y, None), replicas=2).equal


@pytest.mark.slow
def test_exact_training_passes():
    build = builder(lambda: keras.layers.Dropout(0.5), exact=True, clipnorm=0.01)
    report = check_parity(build, batched(4, 11), replicas=4)
    assert report.equal, report
    assert report.batch is None
    assert report.weights < 1e-5
    assert set(report.logs) == {"accuracy", "loss"}


@pytest.mark.parametrize(
    ("factor", "replicas", "name"),
    [(0.25, 4, "1/R"), (4.0, 4, "R"), (1.0, 4, "1"), (0.75, 4, "3/R"), (0.3, 4, ""), (None, 2, "")],
)
def test_factors_are_named_in_replicas(factor, replicas, name):
    report = ParityReport(replicas, equal=False, weights=1.0, logs={}, factor=factor)
    assert report.factor_name == name


def test_logs_alone_may_differ():
    report = ParityReport(2, equal=False, weights=1e-7, logs={"loss": 0.5})
    assert "loss off by 5e-01" in str(report)


def frozen():
    model = builder()()
    model.trainable = False
    return model


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"replicas": 1}, "`replicas` must be an integer of at least 2"),
        ({"replicas": 99}, "More replicas were asked for.*99"),
        ({"build": testing.tiny_classifier}, "a compiled Keras model. Received: build"),
        ({"build": keras.Sequential()}, "`build` must be a function"),
        ({"build": functools.cache(builder())}, "different weights.*must not share layers"),
        ({"data": tf.data.Dataset.range(0)}, "`data` must hold batches"),
        ({"data": None}, "`data` must be a tf.data.Dataset"),
        ({"data": {"x": X}}, "`data` must be a tf.data.Dataset"),
        ({"data": X}, "`data` must be a tf.data.Dataset"),
        ({"data": (X, Y, Y, Y)}, "`data` must be a tf.data.Dataset"),
        ({"data": (None, Y)}, "`data` must be a tf.data.Dataset"),
        ({"data": (X, None, Y)}, "`data` must hold batches of dense tensors"),
        (
            {"data": tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], []]), [0, 1]))},
            "`data` must hold batches of dense tensors",
        ),
        ({"data": tf.data.Dataset.from_tensor_slices((X, Y))}, "`data` must hold batches"),
        ({"data": (X[:0], Y[:0])}, "`data` must hold batches"),
        ({"build": builder(rate=0.0)}, "No weight changed on one device"),
        ({"build": frozen}, "No weight changed on one device.*trained_weights=0"),
        ({"data": (X * np.nan, Y)}, "NaN or infinite on one device already"),
    ],
)
def test_what_leaves_nothing_to_compare_gets_one_sentence(arguments, sentence):
    good = {"build": builder(), "data": (X, Y), "replicas": 2}
    with pytest.raises(ValueError, match=sentence) as raised:
        check_parity(**good | arguments)
    assert "\n" not in str(raised.value)


def test_models_that_start_from_different_weights_raise():
    unseeded = np.random.default_rng()

    def build():
        model = builder()()
        model.layers[0].kernel.assign(unseeded.normal(size=(4, 6)))
        return model

    with pytest.raises(ValueError, match="start from different weights.*share layers.*fixed seed"):
        check_parity(build, (X, Y), replicas=2)


def test_a_metric_that_is_nan_in_both_runs_is_the_same():
    def build():
        model = builder()()
        nan = keras.metrics.MeanMetricWrapper(
            lambda y, p: keras.ops.cast(y, p.dtype) * p[:, 0] * np.nan, name="nan"
        )
        model.compile("sgd", model.loss, metrics=[nan])
        return model

    assert check_parity(build, (X, Y), replicas=2).equal
