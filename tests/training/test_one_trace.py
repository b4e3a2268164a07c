"""A step is traced once on the global batch, and every device computes its part of it."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

from kdpkit import strategies
from kdpkit.training import replica_exact
from tests.training.exactness import assert_close
from tests.training.programs import compile_model
from tests.training.programs.steps import Penalized, TwoLayers, X, Y

pytestmark = pytest.mark.tensorflow


def exact_on(replicas, make):
    with strategies.select_strategy("mirrored", devices=replicas).scope():
        return replica_exact(compile_model(make(), loss="mse", jit_compile=False))


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


@pytest.mark.parametrize("replicas", [2, 8])
def test_a_step_is_traced_as_often_as_on_one_device(replicas):
    models = [exact_on(count, TwoLayers) for count in (1, replicas)]
    for model in models:
        model.fit(batches(), epochs=2, verbose=0)
    assert models[1].traces == models[0].traces >= 1


def products_by_device(fit):
    """Count the matrix products and convolutions of a step's graph, by device."""
    before = {*context.context().list_function_names()}
    fit()
    new = {*context.context().list_function_names()} - before
    steps = [name for name in new if "one_step_on_data" in str(name)]
    definitions = map(context.context().get_function_def, steps)
    definition = max(definitions, key=lambda definition: len(definition.node_def))
    nodes = {node.name: node for node in definition.node_def}
    waiting = [*definition.ret.values(), *definition.control_ret.values()]
    used = set()
    while waiting:
        name = waiting.pop().lstrip("^").split(":")[0]
        if name in nodes and name not in used:
            used.add(name)
            waiting += nodes[name].input
    kinds = ("MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    products = [nodes[name] for name in used if nodes[name].op in kinds]
    return collections.Counter((node.device or "none").rpartition("/")[2] for node in products)


def convolutional():
    convolutions = [layers.Conv2D(4, 3, padding="same") for _ in range(2)]
    others = [layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)]
    shaped = layers.Reshape((3, 2, 1))
    return keras.Sequential([keras.Input((6,)), shaped, *convolutions, *others])


@pytest.mark.parametrize("make", [Penalized, convolutional])
def test_every_device_computes_its_part_of_both_passes(make):
    model = exact_on(3, make)
    products = products_by_device(lambda: model.fit(batches(), verbose=0))
    assert len(products) == 3
    assert max(products.values()) <= 1.1 * min(products.values()), products


def test_tensors_of_a_batch_with_other_lengths_are_one_sentence():
    class Adding(TwoLayers):
        def step_loss(self, x, y):
            return tf.reduce_mean((x + y) ** 2) + tf.reduce_mean(self(x) ** 2)

    spec = tf.TensorSpec([None, 6])
    batches = [(X[:4], X[4:8]), (X[:4], X[:1])]
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=(spec, spec))
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    model = exact_on(2, Adding)
    model.fit(data.take(1), verbose=0)
    before = model.get_weights()
    with pytest.raises(ValueError, match="different numbers of examples.*drop_remainder"):
        model.fit(data.skip(1), verbose=0)
    np.testing.assert_equal(before, model.get_weights())


def test_a_step_may_predict_ragged_tensors():
    class Ragged(TwoLayers):
        def predict_step(self, data):
            return tf.RaggedTensor.from_tensor(self(data))

    models = [exact_on(count, Ragged) for count in (1, 2)]
    models[1].set_weights(models[0].get_weights())
    one, many = (model.predict(X, batch_size=8, verbose=0) for model in models)
    np.testing.assert_allclose(many.to_tensor(), one.to_tensor(), rtol=1e-5)


def test_code_that_needs_numbers_runs_eagerly_as_on_one_device():
    def loss(y, predictions):
        factor = 2.0 if np.mean(predictions.numpy()) > 0 else 1.0
        return factor * tf.reduce_mean((predictions - y) ** 2)

    runs = []
    for replicas in (1, 3):
        keras.utils.set_random_seed(0)
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            model = replica_exact(keras.Sequential([layers.Dense(3)]))
            model.compile("adam", loss, run_eagerly=True)
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        runs.append([history["loss"], *model.get_weights()])
    assert_close(*runs)


def test_one_replica_computes_on_its_device():
    with strategies.select_strategy("mirrored", devices=["CPU:1"]).scope():
        step = replica_exact(lambda x: devices.append(tf.matmul(x, x).device))
    devices = []
    step(tf.ones((2, 2)))
    assert devices[0].endswith("CPU:1")
