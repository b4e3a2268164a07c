"""On JAX nothing trains after a `fit` with `use_ema=True`. Run: python FILE"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
x = np.ones((8, 3), "float32")
model.fit(x, x[:, :1], verbose=0)
try:
    model.fit(x, x[:, :1], verbose=0)
except (RuntimeError, TypeError) as error:  # the second comes while the first is handled
    print("the second fit:", error)
    raise SystemExit(1) from None
