"""Images: classification with augmentation, mixed images, replicas without examples."""

import keras
import numpy as np
from keras import layers, ops

from tests.training.programs import (
    classifier,
    compile_model,
    images,
    on_tensorflow,
    program,
    sparse_cross_entropy,
)


def one_hot():
    data = images()
    return data | {"y": np.eye(4, dtype="float32")[data["y"]]}


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        batch_size, height, width, channels = ops.shape(images)
        patches = ops.image.extract_patches(images, size=self.patch_size)
        count = (height // self.patch_size) * (width // self.patch_size)
        return ops.reshape(patches, (batch_size, count, self.patch_size**2 * channels))


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches, projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(self.num_patches), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


# Keras' augmentation computes in float32 only, and the bias of attention's keys has no gradient but
# rounding, which AdamW scales up to whole steps.
@program("vision transformer with augmentation", images, tolerance=2e-2)
def vision_transformer():
    inputs = keras.Input((8, 8, 3))
    normalization = layers.Normalization()
    normalization.adapt(images()["x"])
    augmentation = keras.Sequential(
        [
            normalization,
            layers.Resizing(12, 12),
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(factor=0.02),
            layers.RandomZoom(height_factor=0.2, width_factor=0.2),
        ],
        name="data_augmentation",
    )
    x = PatchEncoder(9, 8)(Patches(4)(augmentation(inputs)))
    x1 = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=8, dropout=0.1)(x1, x1), x])
    x2 = layers.Dense(8, "gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Dropout(0.5)(layers.Flatten()(layers.Add()([x2, x])))
    model = keras.Model(inputs, layers.Dense(4)(x))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    return compile_model(model, optimizer, sparse_cross_entropy(), metrics=metrics)


class MixupModel(keras.Model):
    """Mixes every image, and its label, with another of its batch."""

    def __init__(self, *args, alpha=0.2, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.seed_generator = keras.random.SeedGenerator(1)

    def train_step(self, data):
        images, labels = data
        batch_size = ops.shape(images)[0]
        order = keras.random.shuffle(ops.arange(batch_size), seed=self.seed_generator)
        share = keras.random.beta((batch_size, 1), self.alpha, self.alpha, seed=self.seed_generator)
        x_share = ops.reshape(share, (batch_size, 1, 1, 1))
        images = images * x_share + ops.take(images, order, axis=0) * (1 - x_share)
        labels = labels * share + ops.take(labels, order, axis=0) * (1 - share)
        return super().train_step((images, labels))


@on_tensorflow("mixup in the step", data=one_hot, run="slow")
def mixup():
    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(inputs))
    outputs = layers.Dense(4, activation="softmax")(layers.Flatten()(layers.MaxPooling2D()(x)))
    model = MixupModel(inputs, outputs)
    return compile_model(model, "adam", "categorical_crossentropy", metrics=["accuracy"])


class CutMixed(keras.Model):
    """Cuts boxes of other images of the batch into an image, in the model."""

    def __init__(self):
        super().__init__()
        self.mix, self.flatten = layers.CutMix(seed=1), layers.Flatten()
        self.classify = layers.Dense(4)

    def call(self, inputs):
        images, labels = inputs
        return self.classify(self.flatten(self.mix({"images": images, "labels": labels})["images"]))


on_tensorflow(
    "images cut and mixed in the model",
    lambda: compile_model(CutMixed(), loss=keras.losses.CategoricalCrossentropy(from_logits=True)),
    lambda: one_hot() | {"x": [images()["x"], one_hot()["y"]]},
    run="slow",
)


# Replicas that have no examples of a batch: the last one has a single example.


def one_at_the_end(shape=(6, 6, 2)):
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype("float32")
    return {"x": x, "y": np.arange(8) % 3, "batch_size": 7}


def without_examples(name, *middle, shape=(6, 6, 2), **settings):
    build = classifier(*middle, layers.Flatten, shape=shape, **{"jit_compile": False} | settings)
    on_tensorflow(f"without examples: {name}", build, lambda: one_at_the_end(shape), run="slow")


without_examples("convolution and max-pooling", lambda: layers.Conv2D(3, 3), layers.MaxPooling2D)
without_examples(
    "along three axes, transposed",
    lambda: layers.Conv3D(3, 2),
    lambda: layers.Conv3DTranspose(2, 2),
    layers.MaxPooling3D,
    shape=(4, 4, 4, 2),
)
without_examples("in groups, which XLA computes", lambda: layers.Conv2D(4, 3, groups=2))
without_examples(
    "in steps that run eagerly",
    lambda: layers.Conv2D(3, 3),
    layers.MaxPooling2D,
    run_eagerly=True,
)
without_examples(
    "compiled by XLA",
    lambda: layers.Conv2D(3, 3),
    lambda: layers.Conv2DTranspose(2, 2),
    layers.MaxPooling2D,
    jit_compile=True,
)
