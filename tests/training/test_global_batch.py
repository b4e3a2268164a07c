"""Which layers of libraries are divided, and which are not. The rest is in programs/."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from kdpkit.training import replica_exact
from kdpkit.training.tensorflow import _library_layers

pytestmark = pytest.mark.tensorflow


class Mixing(layers.Layer):
    """Has parameters, and looks at all examples."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x - ops.mean(x, axis=0) + ops.flip(x, axis=0))


def test_only_layers_of_keras_are_divided_where_a_layer_looks_at_all_examples():
    assert not _library_layers.is_of_a_library(Mixing())
    assert _library_layers.is_of_a_library(layers.Dense(3))
    assert not _library_layers.is_of_a_library(keras.Sequential([layers.Dense(3), Mixing()]))
    assert _library_layers.is_of_a_library(keras.Sequential([layers.Dense(3)]))


def test_slices_of_each_example_are_of_a_library_and_others_are_not():
    x = keras.Input((4, 3))
    assert _library_layers.is_of_a_library(keras.Model(x, layers.Dense(3)(x[:, 0])))
    assert not _library_layers.is_of_a_library(keras.Model(x, layers.Dense(3)(x[1:, 0])))


def attending(axes, *, undivided=False):
    """Build a model of Keras alone; with 2 axes its attention is between examples."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = layers.Reshape((6,) if axes == 2 else (2, 3))(layers.Dense(6)(inputs))
    attention = layers.Attention()
    attended = attention([x, x])
    model = keras.Model(inputs, layers.Dense(1)(layers.Reshape((6,))(attended)))
    model = replica_exact(model, undivided=[attention] if undivided else [])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def fitted(model):
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


NEEDS_NEWER = pytest.mark.needs(keras="3.15", reason="`Attention` takes three axes alone")


@pytest.mark.parametrize("axes", [3, pytest.param(2, marks=NEEDS_NEWER)])
@pytest.mark.parametrize("undivided", [False, True])
def test_attention_trains_as_on_one_device(axes, undivided):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = attending(axes, undivided=undivided)
    np.testing.assert_allclose(fitted(model), fitted(attending(axes)), atol=1e-6)
