"""What is replaced in Keras and TensorFlow while a model trains on replicas, and only then."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kdpkit import strategies
from kdpkit.training import replica_exact
from kdpkit.training.tensorflow import _patches

pytestmark = pytest.mark.tensorflow
MODULES = ("keras", "tensorflow")


def replaced():
    found = set()
    for owner, name, *_ in _patches._TABLE:
        value = inspect.getattr_static(owner, name, None)
        value = getattr(value, "fget", value)
        code = getattr(inspect.unwrap(value, stop=_is_ours), "__code__", None) if value else None
        if code is not None and "kdpkit" in code.co_filename:
            found.add((owner, name))
    return found


def _is_ours(function):
    return "kdpkit" in getattr(getattr(function, "__code__", None), "co_filename", "")


class Watching(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.during, self.numbers = set(), []

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002  # Keras'
        self.during |= replaced()
        optimizer = self.model.optimizer
        self.numbers.append((float(optimizer.learning_rate), int(optimizer.iterations)))


def test_the_table_is_replaced_during_training_and_not_after():
    table = {(owner, name) for owner, name, *_ in _patches._TABLE}
    assert len(table) == len(_patches._TABLE)
    assert not replaced()
    watching, optimizer = Watching(), keras.optimizers.SGD(0.25)
    x = np.ones((6, 2), "float32")
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(3)
    replica_exact(model).fit(data, verbose=0, callbacks=[watching])
    assert watching.during == table
    assert watching.numbers == [(0.25, 1), (0.25, 2)]
    assert (float(optimizer.learning_rate), int(optimizer.iterations)) == (0.25, 2)
    assert not replaced()


def test_a_framework_without_what_is_replaced_raises(monkeypatch):
    monkeypatch.delattr(keras.optimizers.LossScaleOptimizer, "_tf_apply")
    with pytest.raises(ValueError, match="_tf_apply"), _patches.installed():
        pass
    assert not replaced()
