"""What the training step says on TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies, testing, training
from kdpkit.diagnostics import check_tpu

pytestmark = pytest.mark.tensorflow

X, Y = testing.toy_classification(64, features=8)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Calling(keras.layers.Layer):
    """A user's layer that calls a function."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def data(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True)


def with_layer(function, **settings):
    layers = [keras.layers.Dense(8), Calling(function, name="planted"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", LOSS, metrics=["accuracy"], **settings)
    return model


def found(model, dataset=None):
    report = check_tpu(dataset or data(), model=model)
    return [(f.rule, f.level, f.where) for f in report.findings if f.level != "note"]


def count(entries):
    return tf.cast(tf.size(entries), tf.float32)


def python_op(x):
    return x + tf.ensure_shape(
        tf.numpy_function(lambda a: a, [tf.stop_gradient(x)], "float32"), x.shape
    )


def in_a_condition(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x + count(tf.where(x)), lambda: x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "rule", "level"),
    [
        (lambda x: x + count(tf.where(x > 0)), "dynamic-shape", "refused"),
        (lambda x: x + tf.reduce_sum(tf.boolean_mask(x, x > 0)), "dynamic-shape", "refused"),
        (lambda x: x + count(tf.unique(tf.reshape(x, [-1]))[0]), "dynamic-shape", "refused"),
        (python_op, "python-op", "refused"),
        (lambda x: x + tf.strings.to_number(tf.strings.as_string(x)), "xla", "refused"),
        (lambda x: tf.cast(tf.cast(x, tf.float64) * 2, tf.float32), "64-bit", "slow"),
        (lambda x: x + tf.cast(tf.cast(x, tf.int64) * 2, tf.float32), "64-bit", "slow"),
    ],
    ids=["where", "boolean_mask", "unique", "python", "text", "float64", "int64"],
)
def test_a_fault_in_a_layer_is_found_and_the_layer_named(function, rule, level):
    assert set(found(with_layer(function))) == {(rule, level, "layer planted")}


def test_a_dynamic_shape_inside_a_condition_is_found():
    assert "dynamic-shape" in {rule for rule, *_ in found(with_layer(in_a_condition))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.where(x > 0, x, 0.0),
        lambda x: x * tf.cast(x > 0, x.dtype),
        lambda x: keras.ops.take_along_axis(x, keras.ops.argsort(x, axis=-1), axis=-1),
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: x + tf.cast(tf.shape(x, tf.int64)[0], x.dtype),
    ],
    ids=["where of three", "mask", "keras int64", "random", "a size of 64 bits"],
)
def test_what_a_tpu_can_do_is_not_found(function):
    assert found(with_layer(function)) == []


def test_a_print_in_the_step_is_named_with_its_operation():
    def printing(x):
        tf.print(x)
        return x

    (finding,) = (f for f in check_tpu(data(), model=with_layer(printing)).findings
                  if f.level != "note")  # fmt: skip
    assert finding.rule == "xla"
    assert "`tf.print`" in finding.problem
    assert finding.where == "layer planted"


def test_a_fault_in_the_loss_is_found():
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", lambda _, p: tf.reduce_mean(tf.boolean_mask(p, p > 0)))
    ((rule, level, where),) = found(model)
    assert (rule, level) == ("dynamic-shape", "refused")
    assert where.startswith("train step, compile_loss/")


def test_a_variable_of_64_bits_is_found():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, dtype="float64")])
    model.compile("sgd", "mse")
    where = {where for rule, _, where in found(model, data(X, X @ np.ones((8, 16), "f")))}
    assert any(place.startswith("variable") and place.endswith("kernel") for place in where)


def test_a_step_that_cannot_be_traced_is_a_finding_with_the_error():
    def failing(x):
        if x.shape[0] is not None:  # not while the model is built
            raise KeyError("no such thing")
        return x

    report = check_tpu(data(), model=with_layer(failing))
    (finding,) = (f for f in report.findings if f.level != "note")
    assert (finding.rule, finding.where) == ("untraceable-step", "layer planted")
    assert "KeyError: 'no such thing'" in finding.problem


def test_an_eager_model_is_found():
    assert found(with_layer(lambda x: x, run_eagerly=True)) == [
        ("eager-step", "slow", "model sequential")
    ]


def test_nothing_is_trained():
    model = with_layer(lambda x: x)
    before = model.get_weights()
    report = check_tpu(data(), model=model)
    assert report.clean
    assert report.checked == ("data", "step", "widths")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.slow
def test_the_history_of_an_earlier_fit_is_kept():
    model = with_layer(lambda x: x)
    check_tpu(data(), model=model)
    assert not hasattr(model, "history")
    history = model.fit(data(), verbose=0)
    check_tpu(data(), model=model)
    assert model.history is history


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.head = keras.layers.Dense(3)

    def call(self, x):
        return self.head(self.dense(x))


def test_a_model_that_is_not_built_yet_is_built_and_its_head_known():
    model = Subclassed()
    model.compile("adam", LOSS)
    assert found(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["keras", "replica_exact"])
def test_a_model_of_a_strategy_with_one_replica_is_checked(exact):
    with strategies.select_strategy("mirrored", devices=1).scope():
        model = testing.tiny_classifier(features=8)
        model.compile("adam", LOSS)
    assert found(training.replica_exact(model) if exact else model) == []


def test_a_model_of_several_replicas_is_refused_with_the_way_out():
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = testing.tiny_classifier(features=8)
        model.compile("adam", LOSS)
    with pytest.raises(ValueError, match="lives on several replicas.*Build it outside"):
        check_tpu(data(), model=model)


class Masking(training.TrainingLoop):
    def per_example_loss(self, x, y, *, training):
        losses, predictions = super().per_example_loss(x, y, training=training)
        return losses + tf.reduce_sum(tf.boolean_mask(losses, losses > 0)), predictions


@pytest.mark.slow
def test_the_step_of_a_loop_is_checked():
    for kind, expected in ((training.TrainingLoop, set()), (Masking, {"dynamic-shape"})):
        loop = kind(testing.tiny_classifier(features=8), optimizer="adam", loss=LOSS)
        assert {rule for rule, *_ in found(loop)} == expected
        assert int(loop.optimizer.iterations) == 0
        assert {rule for rule, *_ in found(loop, data().repeat())} == expected


@pytest.mark.slow
def test_training_after_a_check_is_what_it_would_have_been():
    weights = []
    for is_checked in (False, True):
        model = testing.tiny_classifier(features=8)
        model.compile("adam", LOSS, metrics=["accuracy"])
        if is_checked:
            check_tpu(data(), model=model)
        model.fit(data(), epochs=2, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
