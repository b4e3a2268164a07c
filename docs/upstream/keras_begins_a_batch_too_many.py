"""Keras on TensorFlow begins one batch too many at the end of a dataset of unknown length."""

import keras
import numpy as np
import tensorflow as tf

batches = tf.data.Dataset.from_generator(
    lambda: ((np.ones((2, 1)), np.ones((2, 1))) for _ in range(3)),
    output_signature=(tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1))),
)
begun, ended = [], []
callback = keras.callbacks.LambdaCallback(
    on_train_batch_begin=lambda batch, logs: begun.append(batch),  # noqa: ARG005
    on_train_batch_end=lambda batch, logs: ended.append(batch),  # noqa: ARG005
)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
model.fit(batches, callbacks=[callback], verbose=0)
print(f"batches begun: {begun}, ended: {ended}")

raise SystemExit(int(len(begun) > len(ended)))
