"""Embeddings that are compared within a batch: contrastive, siamese and metric learning."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import (
    CustomStep,
    compile_model,
    images,
    network,
    on_tensorflow,
    program,
    sparse_cross_entropy,
)


def encoder(width=8):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(width, kernel_size=3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
        ],
        name="encoder",
    )


def augmenter():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.2, 0.2),
            layers.RandomZoom((-0.3, 0.0), (-0.3, 0.0)),
        ],
        name="augmenter",
    )


def labels_of_pairs(similarities):
    return ops.arange(ops.shape(similarities)[0])


@program("SimSiam", lambda: {"x": images()["x"], "batch_size": 7})
class SimSiam(CustomStep):
    def __init__(self):
        norm = layers.BatchNormalization()
        super().__init__(keras.Sequential([encoder(), layers.Dense(8, use_bias=False), norm]))
        self.augmenter, self.predictor = augmenter(), network(8, inputs=8)

    def negative_similarity(self, p, z):
        z = ops.normalize(ops.stop_gradient(z), axis=1)
        return -ops.mean(ops.sum(ops.normalize(p, axis=1) * z, axis=1))

    def step_loss(self, x):
        one, two = (self.augmenter(x, training=True) for _ in range(2))
        z1, z2 = self.net(one, training=True), self.net(two, training=True)
        p1, p2 = self.predictor(z1, training=True), self.predictor(z2, training=True)
        return self.negative_similarity(p1, z2) / 2 + self.negative_similarity(p2, z1) / 2


def pairs_of_images():
    x, y = images()["x"], images(seed=2)["y"] % 2
    return {"x": [x, x[::-1]], "y": y.astype("float32"), "batch_size": 7}


def euclidean_distance(vectors):
    x, y = vectors
    total = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(total, keras.backend.epsilon()))


def contrastive_loss(y_true, y_pred):
    square_pred = ops.square(y_pred)
    margin_square = ops.square(ops.maximum(1 - y_pred, 0))
    return ops.mean((1 - y_true) * square_pred + y_true * margin_square)


@program("siamese network with contrastive loss", pairs_of_images)
def siamese():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, (3, 3), activation="tanh")(layers.BatchNormalization()(inputs))
    x = layers.BatchNormalization()(layers.Flatten()(layers.AveragePooling2D((2, 2))(x)))
    tower = keras.Model(inputs, layers.Dense(6, activation="tanh")(x))
    left, right = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    distance = layers.Lambda(euclidean_distance, output_shape=(1,))([tower(left), tower(right)])
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(distance))
    model = keras.Model([left, right], outputs)
    return compile_model(model, "rmsprop", contrastive_loss, metrics=["accuracy"])


class AnchorPositivePairs(keras.utils.PyDataset):
    """One anchor and one positive of every class; axis 0 tells the two apart."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return images(10, seed=index)["x"].reshape(2, 5, 8, 8, 3)


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings) / 0.2
            loss = self.compute_loss(y=labels_of_pairs(similarities), y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


@on_tensorflow(
    "metric learning from anchors and positives",
    data=lambda: {"x": AnchorPositivePairs()},
    run="slow",
)
def metric_learning():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    model = EmbeddingModel(inputs, layers.UnitNormalization()(layers.Dense(8)(x)))
    return compile_model(model, "adam", sparse_cross_entropy())
