"""A model that shows which learning rate was applied: its one weight falls by just that much."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import keras
import numpy as np


def prediction(_, y):
    return y


def falling_weight(optimizer, **compile_arguments):
    """Build y = w x from w = 0 with the prediction as loss: on inputs of 1 the gradient is 1."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, loss=prediction, **compile_arguments)
    return model


def straight_decay():
    return keras.optimizers.schedules.PolynomialDecay(1.0, 100, end_learning_rate=0.0)


def ones(steps, batch_size=2):
    x = np.ones((steps * batch_size, 1), "float32")
    return {"x": x, "y": x, "batch_size": batch_size, "shuffle": False, "verbose": 0}


class Truth(keras.callbacks.Callback):
    """Reads from the weight, after every batch, the rate of its last update."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self._rate = None

    def on_train_begin(self, logs=None):
        self._weight = self._read()

    def on_train_batch_end(self, batch, logs=None):
        weight = self._read()
        if weight != self._weight:
            self._rate = self._weight - weight
        self._weight = weight

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self._rate)

    def _read(self):
        return float(np.squeeze(self.model.get_weights()[0]))


class SetRate(keras.callbacks.Callback):
    """Sets a plain rate in one hook, each time to a value never used before."""

    def __init__(self, hook, values):
        super().__init__()
        self._values = values
        setattr(self, hook, lambda *_, **__: self._set())

    def _set(self):
        self.model.optimizer.learning_rate = next(self._values)
