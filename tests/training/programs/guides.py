"""The Keras guides: built-in training, steps of one's own, subclassing."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

ROWS, BATCH = 17, 7  # batches of 7, 7 and 3


def _vectors(rows=ROWS, width=12):
    return np.random.default_rng(0).uniform(size=(rows, width)).astype("float32")


def _classes(rows=ROWS, classes=4):
    return np.random.default_rng(1).integers(0, classes, rows)


def _images(rows=ROWS):
    return np.random.default_rng(2).uniform(size=(rows, 8, 8, 1)).astype("float32")


def _digits():
    return {"x": _vectors(), "y": _classes(), "batch_size": BATCH}


def _digits_with_weights():
    weights = np.ones(ROWS, "float32")
    weights[_classes() == 2] = 2.0
    return _digits() | {"sample_weight": weights}


def _numbers():
    y = np.random.default_rng(3).normal(size=(ROWS, 1)).astype("float32")
    return {"x": _vectors(), "y": y, "batch_size": BATCH}


def _numbers_with_weights():
    weights = np.random.default_rng(4).uniform(size=(ROWS, 1)).astype("float32")
    return _numbers() | {"sample_weight": weights}


# Built-in training


def _mlp(activation="softmax"):
    inputs = keras.Input((12,))
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3)(x)
    return keras.Model(inputs, layers.Dense(4, activation=activation)(x))


def _classifier():
    model = _mlp()
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def _weighted_classifier():
    model = _mlp()
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["sparse_categorical_accuracy"],
        weighted_metrics=["sparse_categorical_accuracy"],
    )
    return model


def _tickets_model():
    """Rank support tickets and route them, from two texts and some tags."""
    title = keras.Input((None,), name="title", dtype="int32")
    body = keras.Input((None,), name="body", dtype="int32")
    tags = keras.Input((5,), name="tags")
    of_title = layers.LSTM(8)(layers.Embedding(20, 8)(title))
    of_body = layers.LSTM(4)(layers.Embedding(20, 8)(body))
    x = layers.concatenate([of_title, of_body, tags])
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(3, name="department")(x)
    model = keras.Model([title, body, tags], {"priority": priority, "department": department})
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"priority": ["mae"], "department": ["categorical_accuracy"]},
    )
    return model


def _tickets():
    random = np.random.default_rng(0)
    x = {
        "title": random.integers(0, 20, (ROWS, 6)),
        "body": random.integers(0, 20, (ROWS, 9)),
        "tags": random.integers(0, 2, (ROWS, 5)).astype("float32"),
    }
    y = {
        "priority": random.uniform(size=(ROWS, 1)).astype("float32"),
        "department": np.eye(3, dtype="float32")[random.integers(0, 3, ROWS)],
    }
    return {"x": x, "y": y, "batch_size": BATCH}


def _pictures_and_series_model():
    image = keras.Input((8, 8, 3), name="image")
    series = keras.Input((None, 10), name="series")
    x1 = layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3)(image))
    x2 = layers.GlobalMaxPooling1D()(layers.Conv1D(4, 3)(series))
    x = layers.concatenate([x1, x2])
    score = layers.Dense(1, name="score")(x)
    label = layers.Dense(5, name="label")(x)
    model = keras.Model([image, series], [score, label])
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss=[
            keras.losses.MeanSquaredError(),
            keras.losses.CategoricalCrossentropy(from_logits=True),
        ],
        loss_weights=[2.0, 1.0],
        metrics=[
            [keras.metrics.MeanAbsolutePercentageError(), keras.metrics.MeanAbsoluteError()],
            [keras.metrics.CategoricalAccuracy()],
        ],
    )
    return model


def _pictures_and_series():
    random = np.random.default_rng(0)
    x = [random.uniform(size=(ROWS, 8, 8, 3)), random.uniform(size=(ROWS, 20, 10))]
    y = [random.uniform(size=(ROWS, 1)), random.uniform(size=(ROWS, 5))]
    return {
        "x": [a.astype("float32") for a in x],
        "y": [a.astype("float32") for a in y],
        "batch_size": BATCH,
    }


# Losses of layers


class ActivityRegularization(layers.Layer):
    def __init__(self, penalty, **settings):
        super().__init__(**settings)
        self.penalty = penalty

    def call(self, inputs):
        self.add_loss(self.penalty(inputs))
        return inputs


def _penalized(penalty):
    def build():
        inputs = keras.Input((12,))
        x = layers.Dense(16, activation="relu")(inputs)
        x = ActivityRegularization(penalty)(x)
        x = layers.Dense(16, activation="relu")(x)
        model = keras.Model(inputs, layers.Dense(4)(x))
        model.compile(
            optimizer=keras.optimizers.RMSprop(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    return build


class LogisticEndpoint(layers.Layer):
    """Computes the loss and the accuracy, and returns the predictions."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, targets, logits, sample_weight=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weight))
        self.accuracy.update_state(targets, logits, sample_weight)
        return ops.softmax(logits)


def _endpoint_model():
    inputs = keras.Input((3,), name="inputs")
    targets = keras.Input((10,), name="targets")
    logits = layers.Dense(10)(inputs)
    predictions = LogisticEndpoint(name="predictions")(targets, logits)
    model = keras.Model(inputs=[inputs, targets], outputs=predictions)
    model.compile(optimizer="adam")
    return model


def _inputs_and_targets():
    targets = np.random.default_rng(1).integers(0, 2, (ROWS, 10)).astype("float32")
    return {"x": {"inputs": _vectors(width=3), "targets": targets}, "batch_size": BATCH}


# Steps of one's own


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class WeightedModel(keras.Model):
    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class LowLevelModel(keras.Model):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class AverageLossModel(keras.Model):
    """As the guides to distributed custom loops compute a loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            losses = keras.losses.mean_squared_error(y, y_pred)
            loss = tf.nn.compute_average_loss(losses)
            loss += tf.nn.scale_regularization_loss(1e-3 * ops.sum(self.layers[-1].kernel ** 2))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, y_pred)


class DividedLossModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean(keras.losses.mean_squared_error(y, y_pred))
            loss = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, y_pred)


class GlobalNormClippedModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}


class NormClippedModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.clip_by_norm(gradient, 0.2) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}


class PlainModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}


def _regression(kind, optimizer=keras.optimizers.Adam, hidden=16, **compiled):
    def build():
        inputs = keras.Input((12,))
        x = layers.Dense(hidden, activation="relu")(inputs)
        model = kind(inputs, layers.Dense(1)(x))
        model.compile(**{"optimizer": optimizer(), "loss": "mse", "metrics": ["mae"]} | compiled)
        return model

    return build


def _low_level():
    inputs = keras.Input((12,))
    model = LowLevelModel(inputs, layers.Dense(1)(inputs))
    model.compile(optimizer="adam")
    return model


def _momentum(**settings):
    return lambda: keras.optimizers.SGD(0.1, momentum=0.9, **settings)


# Metrics, losses and optimizers of one's own


class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name="categorical_true_positives", **settings):
        super().__init__(name=name, **settings)
        self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        hits = ops.equal(ops.cast(y_true, "int32"), ops.cast(y_pred, "int32"))
        hits = ops.cast(hits, self.dtype)
        if sample_weight is not None:
            hits = ops.multiply(hits, ops.cast(sample_weight, self.dtype))
        self.true_positives.assign_add(ops.sum(hits))

    def result(self):
        return self.true_positives.value

    def reset_state(self):
        self.true_positives.assign(0.0)


def _counting_classifier():
    model = _mlp()
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[CategoricalTruePositives()],
    )
    return model


def _digits_with_label_axis():
    return _digits() | {"y": _classes()[:, None]}


def custom_mean_squared_error(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def one_number(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred)) + 0.1 * ops.mean(ops.square(0.5 - y_pred))


class CustomMSE(keras.losses.Loss):
    """Keeps predictions of one-hot labels away from 0 and 1."""

    def __init__(self, regularization_factor=0.1, name="custom_mse"):
        super().__init__(name=name)
        self.regularization_factor = regularization_factor

    def call(self, y_true, y_pred):
        mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
        spread = ops.mean(ops.square(0.5 - y_pred), axis=-1)
        return mse + spread * self.regularization_factor


def _with_loss(loss):
    def build():
        model = _mlp()
        model.compile(optimizer=keras.optimizers.Adam(), loss=loss(), metrics=["accuracy"])
        return model

    return build


def _one_hot():
    return _digits() | {"y": np.eye(4, dtype="float32")[_classes()]}


class GCRMSprop(keras.optimizers.RMSprop):
    """RMSprop whose gradients have a mean of zero over all axes but the last."""

    def apply(self, grads, trainable_variables=None):
        centered = []
        for grad in grads:
            if len(grad.shape) > 1:
                axes = list(range(len(grad.shape) - 1))
                grad -= ops.mean(grad, axis=axes, keepdims=True)
            centered.append(grad)
        super().apply(centered, trainable_variables)


class ClippingAdam(keras.optimizers.Adam):
    """Adam that clips a gradient to a part of the norm of its variable."""

    def apply_gradients(self, grads_and_vars):
        clipped = []
        for grad, variable in grads_and_vars:
            most = 0.01 * ops.maximum(ops.norm(variable), 1e-3)
            norm = ops.maximum(ops.norm(grad), 1e-6)
            clipped.append((ops.where(norm > most, grad * (most / norm), grad), variable))
        super().apply_gradients(clipped)


def _horses_model():
    """Tell horses from humans, with augmentation."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(0.1),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.5),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        loss="binary_crossentropy", optimizer=GCRMSprop(learning_rate=1e-3), metrics=["accuracy"]
    )
    return model


def _horses():
    labels = _classes(classes=2)[:, None].astype("float32")
    return {"x": _images(), "y": labels, "batch_size": BATCH}


# Autoencoders


def _sparse_autoencoder():
    inputs = keras.Input((64,))
    code = layers.Dense(8, activation="relu", activity_regularizer=keras.regularizers.L1(1e-4))
    decoded = layers.Dense(64, activation="sigmoid")(code(inputs))
    model = keras.Model(inputs, decoded)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model


def _flat_images():
    x = _images().reshape(ROWS, 64)
    return {"x": x, "y": x, "batch_size": BATCH}


def _convolutional_autoencoder():
    inputs = keras.Input((8, 8, 1))
    x = layers.GaussianNoise(0.2)(inputs)
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model


def _noisy_images():
    x = _images()
    noise = 0.4 * np.random.default_rng(5).normal(size=x.shape)
    return {"x": np.clip(x + noise, 0, 1).astype("float32"), "y": x, "batch_size": BATCH}


TAPE = ("tensorflow",)

PROGRAMS = [
    Program("built-in training with dropout and batch statistics", _classifier, _digits),
    Program("texts and tags to two outputs with loss_weights", _tickets_model, _tickets),
    Program(
        "images and series to two outputs with lists of losses",
        _pictures_and_series_model,
        _pictures_and_series,
    ),
    Program("sample_weight", _weighted_classifier, _digits_with_weights),
    Program(
        "class_weight",
        _weighted_classifier,
        lambda: _digits() | {"class_weight": {0: 1.0, 1: 1.0, 2: 2.0, 3: 0.5}},
    ),
    Program("add_loss of a mean", _penalized(lambda x: 1e-2 * ops.mean(ops.square(x))), _digits),
    Program(
        "add_loss of a sum",
        _penalized(lambda x: 1e-2 * ops.sum(x)),
        _digits,
    ),
    Program(
        "add_loss of a sum for each example",
        _penalized(lambda x: 1e-2 * ops.mean(ops.sum(x, axis=-1))),
        _digits,
    ),
    # On JAX stock Keras cannot update a layer's metric in a step, on one device either.
    Program("a layer that computes loss and accuracy", _endpoint_model, _inputs_and_targets, TAPE),
    Program("train_step with compute_loss", _regression(CustomModel), _numbers, TAPE),
    Program("train_step with its own loss and trackers", _low_level, _numbers, TAPE),
    Program(
        "train_step with sample_weight", _regression(WeightedModel), _numbers_with_weights, TAPE
    ),
    Program("train_step with compute_average_loss", _regression(AverageLossModel), _numbers, TAPE),
    Program(
        "train_step that divides by the number of replicas",
        _regression(DividedLossModel),
        _numbers,
        TAPE,
    ),
    Program(
        "train_step that clips by the global norm",
        _regression(GlobalNormClippedModel, _momentum()),
        _numbers,
        TAPE,
    ),
    Program(
        "an optimizer that clips by the global norm",
        _regression(PlainModel, _momentum(global_clipnorm=0.5)),
        _numbers,
        TAPE,
    ),
    Program(
        "train_step that clips each gradient by its norm",
        _regression(NormClippedModel, _momentum()),
        _numbers,
        TAPE,
    ),
    Program(
        "an optimizer that clips each gradient by its norm",
        _regression(PlainModel, _momentum(clipnorm=0.2)),
        _numbers,
        TAPE,
    ),
    Program("a metric that counts", _counting_classifier, _digits_with_label_axis),
    Program(
        "a metric that compares every label with every prediction",
        _counting_classifier,
        _digits,  # labels without a second axis, as in the guide: they are broadcast
    ),
    Program(
        "a metric that compares labels with predictions one by one",
        _counting_classifier,
        _digits_with_label_axis,
    ),
    Program("a loss function", _with_loss(lambda: custom_mean_squared_error), _one_hot),
    Program("a loss function that returns one number", _with_loss(lambda: one_number), _one_hot),
    Program("a loss class", _with_loss(CustomMSE), _one_hot),
    Program("an optimizer that centralizes gradients", _horses_model, _horses),
    Program(
        "an optimizer that clips gradients to their variables",
        _regression(keras.Model, ClippingAdam),
        _numbers,
        TAPE,
    ),
    Program("a sparse autoencoder", _sparse_autoencoder, _flat_images),
    Program("a convolutional denoising autoencoder", _convolutional_autoencoder, _noisy_images),
]
