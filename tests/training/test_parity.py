import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import testing
from kdpkit.training import check_parity, replica_exact
from tests.training.exactness import cross_entropy
from tests.training.programs import CustomStep, network

X, Y = testing.toy_classification(8)


def batched(size, examples, **settings):
    parts = testing.toy_classification(examples, **settings)
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


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
            optimizer(rate, **settings), loss or cross_entropy(), weighted_metrics=["accuracy"]
        )
        return replica_exact(model) if exact else model

    return build


class PlainMean(keras.Sequential):
    """The loss of a custom loop that nobody divides by the number of replicas."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):  # noqa: ARG002  # Keras' signature
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_mean(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "data", "batch"),
    [
        (builder(clipnorm=0.01), (X, Y), 0),
        (
            builder(loss=cross_entropy(reduction="mean_with_sample_weight")),
            (X, Y, np.arange(8, dtype="float32")),
            0,
        ),
        (builder(), batched(4, 11), 2),
    ],
)
def test_what_keras_gets_wrong_is_located(build, data, batch):
    report = check_parity(build, data, replicas=2)
    assert not report.equal
    assert report.batch == batch
    assert report.variable.endswith(("kernel", "bias", "gamma", "beta"))
    assert re.search(f"`{report.variable}`.*gradients by", str(report))


def test_what_only_replicas_raise_is_in_the_report():
    report = check_parity(builder(clipnorm=0.01), testing.toy_classification(9), replicas=2)
    assert "AddN" in str(report.error)
    assert re.match("2 replicas cannot train this: .*AddN", str(report))


@pytest.mark.slow
def test_a_wrong_factor_is_measured_and_named():
    report = check_parity(builder(make=PlainMean), testing.toy_classification(9), replicas=3)
    assert report.factor == pytest.approx(3.0, rel=1e-4)
    assert "the step is 3 times one device's" in str(report)


def wide_builder(optimizer, *, exact=True):
    """Return what makes a network with ReLU, built by its first batch: small gradients round."""

    def build():
        inner = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        model = keras.Sequential([*inner, keras.layers.Dense(10)])
        model.compile(keras.optimizers.get(optimizer), cross_entropy())
        return replica_exact(model) if exact else model

    return build


def wide_batches(examples):
    return batched(16, examples, features=64, classes=10)


@pytest.mark.slow
def test_rounding_that_an_optimizer_enlarges_is_no_difference_and_hides_none():
    adam = {"class_name": "AdamW", "config": {"learning_rate": 2e-5}}
    report = check_parity(wide_builder(adam), wide_batches(39), replicas=2)
    assert report.equal, report
    assert (report.batch, report.variable) == (None, "")
    assert ("rounding" in str(report)) == (report.weights > 1e-5)
    report = check_parity(wide_builder(adam, exact=False), wide_batches(39), replicas=2)
    assert report.batch == 2
    assert report.gradients > 0.01


class DividingOptimizer(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        divisor = 2.0 if tf.distribute.has_strategy() else 1.0
        super().update_step(gradient / divisor, variable, learning_rate)


@pytest.mark.slow
def test_an_optimizer_that_differs_on_equal_gradients_is_named():
    build = builder(exact=True, optimizer=DividingOptimizer)
    report = check_parity(build, (X, Y), replicas=2)
    assert not report.equal
    assert report.gradients is None
    assert "by the optimizer" in str(report)


class TwoOptimizers(CustomStep):
    """A model whose optimizers are not `model.optimizer`."""

    def __init__(self):
        super().__init__(network(4, inputs=4))
        self.head = network(3, inputs=4)
        self.optimizers = keras.optimizers.SGD(1e-5), keras.optimizers.SGD(1e-4)

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = cross_entropy()(data[1], self.head(self.net(data[0])))
        for optimizer, part in zip(self.optimizers, (self.net, self.head), strict=True):
            self.update(tape, loss, part.trainable_variables, optimizer)
        return {"loss": loss}


def test_gradients_of_several_optimizers_are_compared():
    def build():
        model = replica_exact(TwoOptimizers())
        model.compile()
        return model

    report = check_parity(build, testing.toy_classification(7), replicas=2)
    assert report.equal, report


def frozen():
    model = builder()()
    model.trainable = False
    return model


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"replicas": 1}, "`replicas` must be an integer of at least 2"),
        ({"build": testing.tiny_classifier}, "a compiled Keras model. Received: build"),
        ({"build": keras.Sequential()}, "`build` must be a function"),
        ({"build": functools.cache(builder())}, "different weights.*must not share layers"),
        ({"data": {"x": X}}, "`data` must be a tf.data.Dataset"),
        (
            {"data": tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], []]), [0, 1]))},
            "`data` must hold batches of dense tensors",
        ),
        ({"data": tf.data.Dataset.from_tensor_slices((X, Y))}, "`data` must hold batches"),
        ({"build": frozen}, "No weight changed on one device.*trained_weights=0"),
        ({"data": (X * np.nan, Y)}, "NaN or infinite on one device already"),
    ],
)
def test_what_leaves_nothing_to_compare_gets_one_sentence(arguments, sentence):
    good = {"build": builder(), "data": (X, Y), "replicas": 2}
    with pytest.raises(ValueError, match=sentence) as raised:
        check_parity(**good | arguments)
    assert "\n" not in str(raised.value)
