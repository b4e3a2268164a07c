"""Replicas that have no examples of a batch: convolutions, poolings, sparse inputs."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kdpkit import strategies
from kdpkit.training import replica_exact
from tests.training.programs import Program, outcomes

pytestmark = pytest.mark.tensorflow
SHAPE = (6, 6, 2)


def network(*middle, shape=SHAPE, **settings):
    def build():
        parts = [make() for make in middle]
        model = keras.Sequential([keras.Input(shape), *parts, layers.Flatten(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", **{"jit_compile": False} | settings)
        return model

    return build


def images(shape=SHAPE):
    """Give a batch of seven, and one of two, which leaves the third replica none."""
    random = np.random.default_rng(0)
    x = random.normal(size=(9, *shape)).astype("float32")
    return {"x": x, "y": random.normal(size=(9, 1)).astype("float32"), "batch_size": 7}


NETWORKS = {
    "convolution and max-pooling": network(lambda: layers.Conv2D(3, 3), layers.MaxPooling2D),
    "along three axes, transposed": network(
        lambda: layers.Conv3D(3, 2),
        lambda: layers.Conv3DTranspose(2, 2),
        lambda: layers.MaxPooling3D(2),
        shape=(4, 4, 4, 2),
    ),
    "in groups, which XLA computes": network(lambda: layers.Conv2D(4, 3, groups=2)),
    "in steps that run eagerly": network(
        lambda: layers.Conv2D(3, 3), layers.MaxPooling2D, run_eagerly=True
    ),
    "compiled by XLA": network(
        lambda: layers.Conv2D(3, 3),
        lambda: layers.Conv2DTranspose(2, 2),
        layers.MaxPooling2D,
        jit_compile=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_replica_without_examples_trains_as_one_device(name):
    shape = NETWORKS[name]().input_shape[1:]
    found = outcomes.outcome(Program(name, NETWORKS[name], lambda: images(shape)), 3)
    assert found.verdict == "equal", found


@pytest.mark.slow
def test_the_ctc_loss_has_a_replica_without_examples():
    def build():
        model = keras.Sequential([keras.Input((8, 2)), layers.Dense(5)])
        model.compile(keras.optimizers.SGD(0.05), keras.losses.CTC())
        return model

    labels = np.random.default_rng(1).integers(1, 5, (9, 3))
    data = images((8, 2)) | {"y": labels}
    found = outcomes.outcome(Program("CTC", build, lambda: data), 3)
    assert found.verdict == "equal", found


def test_one_example_is_evaluated_and_predicted():
    with strategies.select_strategy("mirrored", devices=3).scope():
        model = replica_exact(NETWORKS["convolution and max-pooling"]())
    x, y = images()["x"][:1], images()["y"][:1]
    alone = NETWORKS["convolution and max-pooling"]()
    alone.set_weights(model.get_weights())
    np.testing.assert_allclose(
        model.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    assert model.evaluate(x, y, verbose=0) == pytest.approx(
        alone.evaluate(x, y, verbose=0), rel=1e-5
    )


class OnSparse(keras.Model):
    """Takes sparse examples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.dense.build((None, 2))

    def call(self, x):
        x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x  # Keras builds it so
        return self.dense(keras.ops.reshape(x, (-1, 2)))


@pytest.mark.slow
def test_a_batch_of_fewer_sparse_examples_than_replicas_trains():
    x = np.random.default_rng(0).normal(size=(4, 2)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(3)

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = replica_exact(OnSparse())
            model.compile(keras.optimizers.SGD(0.1), "mse")
        loss = model.fit(batches, epochs=2, verbose=0).history["loss"]
        return [*model.get_weights(), loss, model.predict(batches, verbose=0)]

    one = trained(contextlib.nullcontext())
    four = trained(strategies.select_strategy("mirrored", devices=4).scope())
    for alone, split in zip(one, four, strict=True):
        np.testing.assert_allclose(split, alone, rtol=1e-5, atol=1e-6)
