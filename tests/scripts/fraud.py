"""Fraud in few of many payments: `class_weight`, an initial bias, and metrics of the rare class."""

import keras
import numpy as np
from keras import layers

# + from kdpkit.callbacks import TensorBoard, Throughput

random = np.random.default_rng(2)
x = random.normal(size=(130, 8)).astype("float32")
y = (x[:, :1] + x[:, 1:2] > 1.9).astype("float32")
positive = int(y.sum())
weights = {0: len(y) / (2 * (len(y) - positive)), 1: len(y) / (2 * positive)}


def build_model():
    bias = keras.initializers.Constant(np.log(positive / (len(y) - positive)))
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(1, activation="sigmoid", bias_initializer=bias),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.AUC(curve="PR")],
    )
    return model


model = build_model()
history = model.fit(
    x[:100],
    y[:100],
    batch_size=32,
    epochs=3,
    callbacks=[
        # + Throughput(32),
        # + TensorBoard(),
        keras.callbacks.CSVLogger("log.csv"),
    ],
    validation_data=(x[100:], y[100:]),
    class_weight=weights,
)
results = model.evaluate(x[100:], y[100:], return_dict=True)
