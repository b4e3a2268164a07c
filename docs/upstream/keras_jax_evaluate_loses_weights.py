"""On JAX a model loses its weights if `evaluate` or `predict` fails. Run: python FILE"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise OSError("a file is damaged")
        return np.ones((2, 1)), np.ones((2, 1))


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
try:
    model.evaluate(Batches(), verbose=0)
except OSError as error:
    print("evaluate:", error)

is_lost = any(variable._value is None for variable in model.trainable_variables)
print("the weights are lost:", is_lost)

raise SystemExit(int(is_lost))
