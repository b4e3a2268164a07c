"""What `evaluate` and `fit(validation_data=...)` report, beside NumPy.

On both backends: tests/test_environments.py runs this file again on JAX.
"""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import sharding, strategies
from kdpkit.batches import ArrayBatches
from kdpkit.pipelines import eval_pipeline, pad_to_global_batch
from kdpkit.training import replica_exact
from tests.training.exactness import ON_JAX

RANDOM = np.random.default_rng(0)
#: Numbers of examples, and of batches over the replicas: 20 random ones.
SIZES = [(7, 4), *((int(RANDOM.integers(1, 90)), int(RANDOM.integers(1, 33))) for _ in range(19))]


@contextlib.contextmanager
def devices(replicas):
    if not ON_JAX:
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            yield
        return
    former = keras.distribution.distribution()
    keras.distribution.set_distribution(sharding.DataParallel(replicas))
    yield
    keras.distribution.set_distribution(former)


def mean(values, weights):
    """Return what Keras reports as a loss: a mean over all elements, whatever they weigh."""
    return float(np.mean(np.mean(values.reshape(len(values), -1), axis=1) * weights))


def of_classes(outputs, y, weights):
    each = np.log(np.exp(outputs).sum(-1)) - outputs[np.arange(len(y)), y]
    right = outputs.argmax(-1) == y
    return mean(each, weights), right.mean(), np.average(right, weights=weights)


def of_numbers(outputs, y, weights):
    errors = outputs - y
    absolute = np.abs(errors).mean(axis=-1)
    return mean(errors**2, weights), absolute.mean(), np.average(absolute, weights=weights)


def build(outputs, metrics, wrap=replica_exact):
    x = keras.Input((8,))
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    names = {"kind": "accuracy", "size": "mae"}
    if outputs == "dictionary":
        dense = {name: keras.layers.Dense(5, name=name)(x) for name in names}
        model, arguments = keras.Model(x, dense), (loss, {**names}, {**names})
    else:
        model = keras.Model(x, keras.layers.Dense(5, name=outputs)(x))
        arguments = loss[outputs], [names[outputs]], [names[outputs]]
    model = wrap(model)
    settings = {"loss_weights": {"kind": 1.0, "size": 0.5}} if outputs == "dictionary" else {}
    settings["metrics"] = arguments[1] if metrics else None
    # The rate is 0: validation is of the weights that there are before and after.
    model.compile(
        keras.optimizers.SGD(0.0), arguments[0], weighted_metrics=arguments[2], **settings
    )
    return model


def oracle(model, outputs, x, y, weights, metrics):
    found = {}
    for name, of in (("kind", of_classes), ("size", of_numbers)):
        if outputs not in (name, "dictionary"):
            continue
        kernel, bias = (np.asarray(w, "float64") for w in model.get_layer(name).get_weights())
        label = y[name] if outputs == "dictionary" else y
        loss, plain, weighted = of(x @ kernel + bias, label, weights)
        prefix = f"{name}_" if outputs == "dictionary" else ""
        metric = {"kind": "accuracy", "size": "mae"}[name]
        if prefix and (ON_JAX or not metrics):  # see the last test
            found[f"{prefix}loss"] = loss
        share = 0.5 if prefix and name == "size" else 1.0
        found["loss"] = found.get("loss", 0.0) + share * loss
        weighted_name = f"{prefix}weighted_{metric}" if metrics else f"{prefix}{metric}"
        found |= {weighted_name: weighted} | ({f"{prefix}{metric}": plain} if metrics else {})
    return found


def validation_data(x, y, weights, size, replicas, remainder):
    """Return the same examples as a pipeline, as arrays, and as a pipeline of the user's own."""
    parts = (x, y) if weights is None else (x, y, weights)
    source = tf.data.Dataset.from_tensor_slices(parts)
    settings = {} if remainder is None else {"remainder": remainder}
    yield eval_pipeline(source, global_batch_size=size, replicas=replicas, **settings)
    yield ArrayBatches(parts, global_batch_size=size, mode="eval", **settings)
    if remainder == "pad":
        yield source.batch(size).apply(pad_to_global_batch(size, mode="eval"))


def drawn(outputs, examples):
    y = {"kind": RANDOM.integers(0, 5, examples)}
    y["size"] = RANDOM.normal(size=(examples, 5)).astype("float32")
    features = RANDOM.normal(size=(examples, 8)).astype("float32")
    return features, y if outputs == "dictionary" else y[outputs]


CASES = [
    (2, "kind", SIZES[:1]),
    pytest.param(3, "dictionary", SIZES[:2], marks=pytest.mark.slow),
    *(
        pytest.param(
            replicas, outputs, SIZES, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]
        )
        for replicas in (1, 2, 3)
        for outputs in ("kind", "size", "dictionary")
    ),
]


@pytest.mark.parametrize(("replicas", "outputs", "sizes"), CASES)
def test_validation_is_one_pass_over_the_examples(replicas, outputs, sizes):
    """With the default every metric, with padding the loss and weighted metrics."""

    def assert_expected(reported, prefix=""):
        reported = {name: reported[prefix + name] for name in expected}
        assert reported == pytest.approx(expected, rel=2e-5, abs=1e-6)

    trained = drawn(outputs, 6)
    with devices(replicas):
        models = {
            remainder: build(outputs, metrics=remainder is None) for remainder in (None, "pad")
        }
        for (remainder, model), (examples, per_replica), is_weighted in itertools.product(
            models.items(), sizes, (False, True)
        ):
            size = -(-per_replica // replicas) * replicas
            x, y = drawn(outputs, examples)
            weights = RANDOM.uniform(0.5, 2, examples).astype("float32") if is_weighted else None
            factors = np.ones(examples) if weights is None else weights
            expected = oracle(model, outputs, x, y, factors, metrics=remainder is None)
            for data in validation_data(x, y, weights, size, replicas, remainder):
                assert_expected(model.evaluate(data, return_dict=True, verbose=0))
            data = next(validation_data(x, y, weights, size, replicas, remainder))
            history = model.fit(*trained, validation_data=data, verbose=0).history
            assert_expected({name: values[0] for name, values in history.items()}, "val_")


@pytest.mark.parametrize("examples", [5, 9, 12])
def test_stock_keras_evaluates_uneven_batches_right_or_raises(examples):
    """On TensorFlow it raises in a first batch that the replicas do not divide, on JAX in any."""
    x, y = drawn("kind", examples)
    data = eval_pipeline(tf.data.Dataset.from_tensor_slices((x, y)), global_batch_size=8)
    with devices(2):
        model = build("kind", metrics=True, wrap=lambda model: model)
        expected = oracle(model, "kind", x, y, np.ones(examples), metrics=True)
        try:
            reported = model.evaluate(data, return_dict=True, verbose=0)
        except (ValueError, tf.errors.InvalidArgumentError):
            assert examples % 2
            return
    assert reported == pytest.approx(expected, rel=2e-5)


@pytest.mark.tensorflow
def test_keras_reports_the_loss_of_one_of_several_outputs_as_a_mean_over_batches():
    """On TensorFlow, where a batch's size is not in its shape; `loss` is right."""
    x, y = RANDOM.normal(size=(7, 8)), RANDOM.normal(size=(7, 5))
    inputs = keras.Input((8,))
    model = keras.Model(inputs, [keras.layers.Dense(5, name=name)(inputs) for name in "ab"])
    model.compile("sgd", "mse")
    outputs = [np.asarray(output) for output in model(x)]
    reported = model.evaluate(x, [y, y], batch_size=4, verbose=0, return_dict=True)
    losses = [((output - y) ** 2).mean(axis=1) for output in outputs]
    over_batches = [np.mean([loss[:4].mean(), loss[4:].mean()]) for loss in losses]
    assert [reported["a_loss"], reported["b_loss"]] == pytest.approx(over_batches, rel=1e-5)
    assert reported["loss"] == pytest.approx(sum(loss.mean() for loss in losses), rel=1e-5)
