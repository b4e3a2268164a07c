"""Tables and series: recommenders, preprocessing layers, forecasting, quantiles."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

USERS, MOVIES = 9, 12


def _random():
    return np.random.default_rng(0)


class RecommenderNet(keras.Model):
    """The published one: its `tensordot` over two axes adds up over the batch as well."""

    def __init__(self, num_users=USERS, num_movies=MOVIES, embedding_size=4, **kwargs):
        super().__init__(**kwargs)
        regularizer = keras.regularizers.l2(1e-6)
        self.user_embedding, self.movie_embedding = (
            layers.Embedding(
                count,
                embedding_size,
                embeddings_initializer="he_normal",
                embeddings_regularizer=regularizer,
            )
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


def _recommender():
    model = RecommenderNet()
    model.compile(
        loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001)
    )
    return model


def _ratings():
    random = _random()
    x = np.stack([random.integers(0, USERS, 17), random.integers(0, MOVIES, 17)], axis=1)
    return {"x": x, "y": random.uniform(size=17).astype("float32"), "batch_size": 7}


def _factorization():
    user, movie = keras.Input((1,), name="user"), keras.Input((1,), name="movie")
    vectors = [
        layers.Flatten()(layers.Embedding(count, 4)(one))
        for one, count in ((user, USERS), (movie, MOVIES))
    ]
    biases = [
        layers.Flatten()(layers.Embedding(count, 1)(one))
        for one, count in ((user, USERS), (movie, MOVIES))
    ]
    x = layers.Add()([layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model([user, movie], layers.Dense(1)(x))
    model.compile(loss="mse", optimizer=keras.optimizers.Adagrad(0.1), metrics=["mae"])
    return model


def _users_and_movies():
    data = _ratings()
    x = {"user": data["x"][:, 0], "movie": data["x"][:, 1]}
    return data | {"x": x}


def _patients():
    random = _random()
    return {
        "age": random.integers(20, 80, 17),
        "thal": random.choice(["fixed", "normal", "reversible"], 17),
        "cp": random.integers(0, 5, 17),
        "chol": random.normal(200, 50, 17).astype("float32"),
    }


def _heart_dataset():
    y = _random().integers(0, 2, 17)
    return {"x": tf.data.Dataset.from_tensor_slices((_patients(), y)).batch(7)}


def _feature_space():
    feature_space = keras.utils.FeatureSpace(
        features={
            "cp": "integer_categorical",
            "thal": "string_categorical",
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "chol": "float_normalized",
        },
        crosses=[keras.utils.FeatureSpace.cross(["cp", "thal"], crossing_dim=8)],
        output_mode="concat",
    )
    feature_space.adapt(_heart_dataset()["x"].map(lambda x, _: x))
    encoded = feature_space.get_encoded_features()
    x = layers.Dropout(0.5)(layers.Dense(8, activation="relu")(encoded))
    model = keras.Model(feature_space.get_inputs(), layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    return model


def _encoded_in_the_data():
    """Preprocess in the data, train on numbers: the other half of the same guide."""
    patients = _patients()
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(patients["thal"])
    cp = layers.IntegerLookup(output_mode="one_hot", vocabulary=[0, 1, 2, 3, 4])

    def encode(x, y):
        return {"thal": lookup(x["thal"]), "cp": cp(x["cp"]), "chol": x["chol"][:, None]}, y

    return {"x": _heart_dataset()["x"].map(encode)}


def _on_encoded():
    inputs = {
        name: keras.Input((n,), name=name) for name, n in (("thal", 4), ("cp", 6), ("chol", 1))
    }
    normalization = layers.Normalization()
    normalization.adapt(_patients()["chol"][:, None])
    parts = [inputs["thal"], inputs["cp"], normalization(inputs["chol"])]
    x = layers.Dense(8, activation="relu")(layers.Concatenate()(parts))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.5)(x)))
    model.compile(
        optimizer="adam",
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    return model


def _wide_and_deep():
    kind = keras.Input((1,), dtype="int64", name="kind")
    number = keras.Input((3,), name="number")
    one_hot = layers.CategoryEncoding(num_tokens=5, output_mode="one_hot")(kind)
    wide = layers.BatchNormalization()(layers.Concatenate()([one_hot, number]))
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(5, 3)(kind)), number])
    for units in (8, 8):
        x = layers.BatchNormalization()(layers.Dense(units)(x))
        x = layers.Dropout(0.1)(layers.ReLU()(x))
    x = layers.concatenate([wide, x])
    model = keras.Model({"kind": kind, "number": number}, layers.Dense(3, activation="softmax")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def _cover_types():
    random = _random()
    x = {
        "kind": random.integers(0, 5, (17, 1)),
        "number": random.normal(size=(17, 3)).astype("float32"),
    }
    weight = random.uniform(0.5, 2, 17).astype("float32")
    return {"x": x, "y": random.integers(0, 3, 17), "sample_weight": weight, "batch_size": 7}


def _forecaster():
    inputs = keras.Input((6, 3))
    x = layers.LSTM(8)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
    return model


def _climate():
    series = _random().normal(size=(24, 3)).astype("float32").cumsum(axis=0)
    dataset = keras.utils.timeseries_dataset_from_array(
        series[:-1], series[6:, 1], sequence_length=6, sampling_rate=1, batch_size=7
    )
    return {"x": dataset}


def pinball(quantile):
    def loss(y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.maximum(quantile * error, (quantile - 1) * error), axis=-1)

    return loss


def _quantiles():
    inputs = keras.Input((4,))
    x = layers.Dense(8, activation="relu")(inputs)
    x = layers.Dense(8, activation="relu")(x)
    outputs = [layers.Dense(1, name=f"q{q}")(x) for q in (10, 50, 90)]
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Nadam(1e-2), loss=[pinball(q) for q in (0.1, 0.5, 0.9)]
    )
    return model


def tilted_loss(y_true, y_pred):
    quantiles = ops.convert_to_tensor([0.1, 0.5, 0.9], dtype=y_pred.dtype)
    error = y_true - y_pred
    return ops.mean(ops.maximum(quantiles * error, (quantiles - 1) * error))


def _tilted():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer="adam", loss=tilted_loss)
    return model


def _measurements(outputs=1):
    random = _random()
    x = random.normal(size=(17, 4)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + random.normal(size=(17, 1))).astype("float32")
    return {"x": x, "y": [y] * outputs if outputs > 1 else y, "batch_size": 7}


_TENSORFLOW = ("tensorflow",)

PROGRAMS = [
    Program(
        "recommender with a product over the batch",
        _recommender,
        _ratings,
    ),
    Program("matrix factorization", _factorization, _users_and_movies),
    Program("feature space in the model", _feature_space, _heart_dataset, _TENSORFLOW),
    Program("lookups in the data", _on_encoded, _encoded_in_the_data),
    Program("wide and deep", _wide_and_deep, _cover_types),
    Program("forecasting", _forecaster, _climate),
    Program("three quantiles, three outputs", _quantiles, lambda: _measurements(3)),
    Program("three quantiles, one number", _tilted, _measurements),
]
