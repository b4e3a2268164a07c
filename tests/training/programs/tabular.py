"""Tables and series: recommenders, preprocessing layers, forecasting."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import compile_model, on_tensorflow, program

USERS, MOVIES = 9, 12


def ratings():
    random = np.random.default_rng(0)
    x = np.stack([random.integers(0, USERS, 17), random.integers(0, MOVIES, 17)], axis=1)
    return {"x": x, "y": random.uniform(size=17).astype("float32"), "batch_size": 7}


class RecommenderNet(keras.Model):
    """The published one: its `tensordot` over two axes adds up over the batch as well."""

    def __init__(self, num_users=USERS, num_movies=MOVIES, embedding_size=4, **kwargs):
        super().__init__(**kwargs)
        self.user_embedding, self.movie_embedding = (
            layers.Embedding(count, embedding_size, embeddings_regularizer="l2")
            for count in (num_users, num_movies)
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        dot_user_movie = ops.tensordot(user_vector, movie_vector, 2)
        x = dot_user_movie + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1])
        return ops.sigmoid(x)


program("recommender with a product over the batch", ratings)(
    lambda: compile_model(RecommenderNet(), "adam", keras.losses.BinaryCrossentropy())
)


def patients():
    random = np.random.default_rng(0)
    return {
        "age": random.integers(20, 80, 17),
        "thal": random.choice(["fixed", "normal", "reversible"], 17),
        "cp": random.integers(0, 5, 17),
        "chol": random.normal(200, 50, 17).astype("float32"),
    }


def diagnosed():
    return {"x": tf.data.Dataset.from_tensor_slices((patients(), np.arange(17) % 2)).batch(7)}


def feature_space():
    space = keras.utils.FeatureSpace(
        features={
            "cp": "integer_categorical",
            "thal": "string_categorical",
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "chol": "float_normalized",
        },
        crosses=[keras.utils.FeatureSpace.cross(["cp", "thal"], crossing_dim=8)],
        output_mode="concat",
    )
    space.adapt(diagnosed()["x"].map(lambda x, _: x))
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(space.get_encoded_features()))
    model = keras.Model(space.get_inputs(), layers.Dense(1, activation="sigmoid")(x))
    return compile_model(model, "adam", "binary_crossentropy", metrics=["accuracy"])


on_tensorflow("feature space in the model", feature_space, diagnosed)


def encoded_in_the_data():
    """Preprocess in the data, and train on numbers: the other half of the same guide."""
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(patients()["thal"])

    def encode(x, y):
        return {"thal": lookup(x["thal"]), "chol": x["chol"][:, None]}, y

    return {"x": diagnosed()["x"].map(encode)}


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
