import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import testing
from kdpkit.training import ParityReport, check_parity, replica_exact


def builder(*middle, exact=False, make=keras.Sequential, loss=None, **optimizer):
    def build():
        inner = [keras.Input((4,)), keras.layers.Dense(6, "tanh"), *(layer() for layer in middle)]
        model = make([*inner, keras.layers.Dense(3)])
        mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.SGD(0.1, **optimizer), loss or mean, weighted_metrics=["accuracy"]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "rows", "cause"),
    [
        (builder(clipnorm=0.01), 8, "clipping before the reduction"),
        (builder(keras.layers.BatchNormalization), 8, "batch statistics"),
        (builder(lambda: keras.layers.Dropout(0.5)), 8, "random layers"),
    ],
)
def test_what_keras_gets_wrong_has_its_cause_named(build, rows, cause):
    report = check_parity(build, testing.toy_classification(rows), replicas=2)
    assert not report.equal
    assert report.cause.startswith(cause)
    assert report.batch == 0
    assert f"Likely cause: {cause}" in str(report)


@pytest.mark.slow
def test_an_uneven_last_batch_is_found_where_it_stands():
    x, y = testing.toy_classification(11)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    report = check_parity(builder(), batches, replicas=2)
    assert report.batch == 2
    assert report.cause.startswith("uneven batch")


@pytest.mark.slow
def test_a_loss_divided_by_each_replicas_weights_is_found():
    x, y = testing.toy_classification(8)
    weights = np.arange(8, dtype="float32")
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    report = check_parity(builder(loss=loss), (x, y, weights), replicas=4)
    assert report.cause.startswith("the loss divides by each replica's own weights")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "factor"), [(PlainMean, "R"), (DividedTwice, "1/R")])
def test_a_wrong_factor_is_measured_and_named(make, factor):
    report = check_parity(builder(make=make), testing.toy_classification(9), replicas=3)
    assert report.factor_name == factor
    assert report.factor == pytest.approx({"R": 3.0, "1/R": 1 / 3}[factor], rel=1e-4)
    assert f"({factor}) times one device's" in str(report)


def test_exact_training_passes():
    x, y = testing.toy_classification(11)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    report = check_parity(builder(exact=True, clipnorm=0.01), batches, replicas=4)
    assert report.equal, report
    assert report.batch is None
    assert report.weights < 1e-5
    assert set(report.logs) == {"accuracy", "loss"}
    assert str(report).startswith("4 replicas train what one device trains")


@pytest.mark.parametrize(
    ("factor", "replicas", "name"),
    [(0.25, 4, "1/R"), (4.0, 4, "R"), (1.0, 4, "1"), (0.75, 4, "3/R"), (0.3, 4, ""), (None, 2, "")],
)
def test_factors_are_named_in_replicas(factor, replicas, name):
    report = ParityReport(replicas, equal=False, weights=1.0, logs={}, factor=factor)
    assert report.factor_name == name


def test_logs_alone_may_differ():
    report = ParityReport(2, equal=False, weights=1e-7, logs={"loss": 0.5})
    assert str(report) == (
        "2 replicas train what one device trains, but log it off: loss by 5e-01."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"replicas": 1}, "`replicas` must be an integer of at least 2"),
        ({"replicas": 99}, "More replicas were asked for.*99"),
        ({"build": testing.tiny_classifier}, "must return a compiled Keras model. Received: build"),
        ({"data": tf.data.Dataset.range(0)}, "`data` holds no batch"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    good = {"build": builder(), "data": testing.toy_classification(4), "replicas": 2}
    with pytest.raises(ValueError, match=sentence):
        check_parity(**good | arguments)
