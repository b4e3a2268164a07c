import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import testing
from kdpkit.training import ParityReport, check_parity, replica_exact


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
        mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(rate, **settings), loss or mean, weighted_metrics=["accuracy"])
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
def test_several_causes_at_once_are_all_named():
    dropping = builder(keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5))
    batches = tf.data.Dataset.from_tensor_slices(testing.toy_classification(11)).batch(8)
    found = check_parity(dropping, batches, replicas=2).cause
    assert [cause.partition(":")[0] for cause in found.split("; ")] == [
        "batch statistics",
        "random layers",
    ]
    uneven = check_parity(builder(clipnorm=0.01), batches.skip(1), replicas=2)
    assert uneven.error is not None
    batches = batches.take(1).concatenate(batches.skip(1))
    clipped = builder(clipvalue=1e-3, optimizer=keras.optimizers.Adam)
    found = check_parity(clipped, batches, replicas=2)
    assert found.batch == 0
    assert found.cause.startswith("clipping before")


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


def wide_builder(optimizer, *, exact=True, middle=(), lazy=False):
    """Build a network with ReLU, whose smallest gradients are rounding."""

    def build():
        inner = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu")]
        front = [] if lazy else [keras.Input((64,))]
        model = keras.Sequential(
            [*front, *inner, *(layer() for layer in middle), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.get(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return replica_exact(model) if exact else model

    return build


def wide_batches(rows):
    x, y = testing.toy_classification(rows, features=64, classes=10)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


def settings(name, **config):
    return {"class_name": name, "config": config}


SMALL_STEPS = [
    settings("SGD", learning_rate=1e-3),
    settings("SGD", learning_rate=1e-6),
    settings("Adam", learning_rate=1e-3),
    settings("AdamW", learning_rate=2e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SMALL_STEPS, ids=lambda optimizer: optimizer["class_name"])
def test_rounding_that_an_optimizer_enlarges_is_no_difference(optimizer):
    report = check_parity(wide_builder(optimizer), wide_batches(64), replicas=2)
    assert report.equal, report
    assert report.batch is None
    assert report.cause == ""
    if report.weights > 1e-5:
        assert "no more than rounding does on one device" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SMALL_STEPS[1::2], ids=["SGD", "AdamW"])
def test_rounding_hides_no_uneven_batch(optimizer):
    report = check_parity(wide_builder(optimizer, exact=False), wide_batches(39), replicas=2)
    assert report.batch == 2
    assert report.cause.startswith("uneven batch")
    assert report.gradients > 0.01
    assert "gradients by" in str(report)


@pytest.mark.slow
def test_a_model_that_its_first_batch_builds_is_compared_too():
    build = wide_builder(settings("Adam", learning_rate=1e-3), lazy=True)
    report = check_parity(build, wide_batches(39), replicas=2)
    assert report.equal, report


@pytest.mark.slow
def test_dropout_of_an_exact_model_is_that_of_one_device():
    build = wide_builder(settings("SGD"), middle=[lambda: keras.layers.Dropout(0.5)])
    data = testing.toy_classification(45, features=64, classes=10)
    assert check_parity(build, data, replicas=2).equal


class DividingOptimizer(keras.optimizers.SGD):
    """An optimizer that is wrong on replicas by itself."""

    def update_step(self, gradient, variable, learning_rate):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        super().update_step(gradient / replicas, variable, learning_rate)


@pytest.mark.slow
def test_an_optimizer_that_differs_on_equal_gradients_is_named():
    report = check_parity(
        builder(exact=True, optimizer=DividingOptimizer),
        testing.toy_classification(8),
        replicas=2,
    )
    assert not report.equal
    assert report.cause.startswith("the optimizer")


class TwoOptimizers(keras.Model):
    """A model whose optimizers are not `model.optimizer`."""

    def __init__(self):
        super().__init__()
        self.body, self.head = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]) for _ in range(2)
        )
        self.for_body, self.for_head = keras.optimizers.SGD(1e-5), keras.optimizers.SGD(1e-4)
        self.mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

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
def test_an_uneven_first_batch_is_a_finding_with_its_remedy():
    report = check_parity(builder(), testing.toy_classification(9), replicas=2)
    assert not report.equal
    assert isinstance(report.error, tf.errors.InvalidArgumentError)
    assert "2 replicas cannot train" in str(report)
    assert "Inputs to operation AddN" in str(report)
    assert "uneven batch: Keras cannot build a model on replicas" in str(report)
    assert "use `replica_exact`" in str(report)


def test_what_the_run_on_replicas_raises_is_a_finding():
    def build():
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise LookupError("no such thing\nand more")
        return builder()()

    report = check_parity(build, testing.toy_classification(8), replicas=2)
    assert not report.equal
    assert isinstance(report.error, LookupError)
    assert str(report) == (
        "2 replicas cannot train what one device trains: LookupError: no such thing."
    )


def test_what_one_device_raises_passes_through():
    def build():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        check_parity(build, testing.toy_classification(8), replicas=2)


def test_weights_of_none_are_left_out():
    x, y = testing.toy_classification(8)
    assert check_parity(builder(), (x, y, None), replicas=2).equal


@pytest.mark.slow
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


X, Y = testing.toy_classification(8)


def frozen():
    model = builder()()
    model.trainable = False
    return model


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"data": None}, "`data` must be a tf.data.Dataset.*Received: types='NoneType'"),
        ({"data": {"x": X}}, "`data` must be a tf.data.Dataset.*'dict'"),
        ({"data": X}, "`data` must be a tf.data.Dataset.*'ndarray'"),
        ({"data": iter([(X, Y)])}, "`data` must be a tf.data.Dataset.*from_generator"),
        ({"data": (X, Y, Y, Y)}, "`data` must be a tf.data.Dataset"),
        ({"data": (None, Y)}, "`data` must be a tf.data.Dataset.*'NoneType', 'ndarray'"),
        ({"data": (object(), Y)}, "`data` must hold arrays.*'object', 'ndarray'"),
        ({"data": (X, None, Y)}, "`data` must hold dense tensors alone.*leave a None out"),
        (
            {"data": tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], []]), [0, 1]))},
            "`data` must hold dense tensors alone.*Pad ragged ones",
        ),
        ({"data": tf.data.Dataset.from_tensor_slices((X, Y))}, "`data` must hold batches"),
        ({"data": tf.data.Dataset.from_tensor_slices((X, np.eye(3)[Y]))}, "must hold batches"),
        ({"data": (X, Y[:3])}, "`data` must hold batches.*8, 4.*3,"),
        ({"data": (X[:0], Y[:0])}, "`data` holds a batch without rows"),
        ({"build": builder(rate=0.0)}, "No weight changed on one device"),
        ({"build": frozen}, "No weight changed on one device.*trainable_weights=0"),
        ({"data": (X * np.nan, Y)}, "gives NaN or infinite weights on one device already"),
    ],
)
def test_what_leaves_nothing_to_compare_gets_one_sentence(arguments, sentence):
    good = {"build": builder(), "data": (X, Y), "replicas": 2}
    with pytest.raises(ValueError, match=sentence) as refused:
        check_parity(**good | arguments)
    assert "\n" not in str(refused.value)


def test_a_model_is_no_function_that_gives_one():
    model = builder()()
    with pytest.raises(ValueError, match="`build` must be a function that gives a new model"):
        check_parity(model, (X, Y), replicas=2)
    with pytest.raises(ValueError, match="`build` must give a new model each time"):
        check_parity(lambda: model, (X, Y), replicas=2)


def test_models_that_start_from_different_weights_are_refused():
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
