"""Keras' rematerialisation fails where a layer has a state, such as Dropout's seed."""

import keras
import numpy as np

with keras.RematScope(mode="full"):
    block = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((4,)), block])
model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")
try:
    model.fit(x, x, verbose=0)
except Exception as error:
    print(
        f"{keras.backend.backend()}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    )
    raise SystemExit(1) from None
print("no error")
