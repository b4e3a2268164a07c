"""Tables: preprocessing layers in the data and in the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.training.programs import compile_model, program


def patients():
    random = np.random.default_rng(0)
    thal = random.choice(["fixed", "normal", "reversible"], 17)
    return {"thal": thal, "chol": random.normal(200, 50, 17).astype("float32")}


def encoded_in_the_data():
    """Preprocess in the data, and train on numbers."""
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(patients()["thal"])

    def encode(x, y):
        return {"thal": lookup(x["thal"]), "chol": x["chol"][:, None]}, y

    diagnosed = tf.data.Dataset.from_tensor_slices((patients(), np.arange(17) % 2))
    return {"x": diagnosed.batch(7).map(encode)}


@program("lookups in the data", encoded_in_the_data)
def on_encoded():
    thal, chol = keras.Input((4,), name="thal"), keras.Input((1,), name="chol")
    normalization = layers.Normalization()
    normalization.adapt(patients()["chol"][:, None])
    x = layers.Dense(8, activation="relu")(layers.Concatenate()([thal, normalization(chol)]))
    model = keras.Model({"thal": thal, "chol": chol}, layers.Dense(1)(layers.Dropout(0.5)(x)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metrics = [keras.metrics.BinaryAccuracy(threshold=0.0)]
    return compile_model(model, "adam", loss, metrics=metrics)
