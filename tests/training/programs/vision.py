"""Images: segmentation, classification with augmentation, detection, masked patches."""

import keras
import numpy as np
import tensorflow as tf
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


def convolutions(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
    return x


def dice_loss(y_true, y_pred, smooth=1.0):
    y_true, y_pred = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    intersection = ops.sum(y_true * y_pred)
    dice = (2.0 * intersection + smooth) / (ops.sum(y_true) + ops.sum(y_pred) + smooth)
    return 1 - dice


def organs():
    masks = np.random.default_rng(1).uniform(size=(17, 8, 8, 1)) < 0.3
    return images() | {"y": masks.astype("float32")}


@program("U-Net with a Dice loss", organs)
def unet():
    inputs = keras.Input((8, 8, 3))
    skip = convolutions(inputs, 4)
    x = convolutions(layers.MaxPooling2D()(skip), 8)
    x = layers.Conv2DTranspose(4, 2, strides=2, padding="same")(x)
    x = convolutions(layers.Concatenate()([x, skip]), 4)
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    return compile_model(model, "adam", dice_loss)


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
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        loss=sparse_cross_entropy(),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
        ],
    )
    return model


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


@program("mixup in the step", one_hot, backends=("tensorflow",))
def mixup():
    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(inputs))
    outputs = layers.Dense(4, activation="softmax")(layers.Flatten()(layers.MaxPooling2D()(x)))
    model = MixupModel(inputs, outputs)
    return compile_model(model, "adam", "categorical_crossentropy", metrics=["accuracy"])


program("convnet with noise and dropouts", images)(
    classifier(
        lambda: layers.GaussianNoise(0.1),
        lambda: layers.Conv2D(8, 3, activation="relu"),
        lambda: layers.SpatialDropout2D(0.2),
        layers.MaxPooling2D,
        layers.Flatten,
        lambda: layers.Dense(8, activation="selu"),
        lambda: layers.AlphaDropout(0.1),
        lambda: layers.GaussianDropout(0.2),
        shape=(8, 8, 3),
        classes=4,
        optimizer="adam",
    )
)


def boxes_and_classes():
    """Return eight anchors for each image, some of them without an object."""
    random = np.random.default_rng(0)
    classes = random.choice([-1, -1, 0, 1, 2], (17, 8))
    boxes = np.concatenate([random.normal(size=(17, 8, 4)), classes[..., None] > -1], axis=-1)
    return images() | {"y": {"boxes": boxes.astype("float32"), "classes": classes.astype("int32")}}


def batch_normalized_box_loss(y_true, y_pred):
    """Return the loss of the anchors with an object, over their number in the batch."""
    boxes, positive = y_true[..., :4], y_true[..., 4]
    losses = ops.sum(ops.abs(boxes - y_pred), axis=-1) * positive
    return ops.sum(losses) / ops.maximum(ops.sum(positive), 1.0)


@program("detector with losses by output", boxes_and_classes)
def detector():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    boxes = layers.Reshape((8, 4), name="boxes")(layers.Conv2D(8, 1)(x))
    classes = layers.Reshape((8, 3), name="classes")(layers.Conv2D(6, 1)(x))
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return compile_model(
        keras.Model(inputs, {"boxes": boxes, "classes": classes}),
        keras.optimizers.Adam(5e-4, global_clipnorm=10.0),
        {"boxes": batch_normalized_box_loss, "classes": cross_entropy},
        loss_weights={"boxes": 2.0, "classes": 1.0},
    )


@program(
    "masked autoencoder",
    lambda: {"x": images(channels=1)["x"], "batch_size": 7},
    optimizer=lambda: keras.optimizers.AdamW(learning_rate=5e-3, weight_decay=1e-4),
    loss="mse",
    metrics=["mae"],
)
class MaskedAutoencoder(keras.Model):
    """Sees a quarter of an image's patches, and predicts the others."""

    def __init__(self, patch_size=2, width=8, mask_proportion=0.75):
        super().__init__()
        self.augmentation = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.RandomCrop(8, 8), layers.RandomFlip("horizontal")]
        )
        self.num_patches = (8 // patch_size) ** 2
        self.num_mask = int(mask_proportion * self.num_patches)
        self.patches = Patches(patch_size)
        self.projection = layers.Dense(width)
        self.positions = layers.Embedding(self.num_patches, width)
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.decoder = layers.Dense(patch_size**2)
        self.mask_token = self.add_weight(shape=(1, 1, width), initializer="random_normal")
        self.seed_generator = keras.random.SeedGenerator(42)

    def random_indices(self, batch_size):
        noise = keras.random.uniform((batch_size, self.num_patches), seed=self.seed_generator)
        order = ops.argsort(noise, axis=-1)
        return order[:, : self.num_mask], order[:, self.num_mask :]

    def call(self, images):
        return self.reconstruct(images)[1]

    def reconstruct(self, images, training=False):
        patches = self.patches(images)
        batch_size = ops.shape(patches)[0]
        hidden, seen = self.random_indices(batch_size)
        positions = self.positions(ops.arange(self.num_patches)[None])
        positions = ops.tile(positions, [batch_size, 1, 1])
        tokens = self.projection(patches) + positions
        visible = ops.take_along_axis(tokens, seen[..., None], axis=1)
        visible = self.norm(visible + self.attention(visible, visible, training=training))
        masked = ops.take_along_axis(positions, hidden[..., None], axis=1) + self.mask_token
        decoded = self.decoder(self.norm(masked + self.attention(masked, visible)))
        return ops.take_along_axis(patches, hidden[..., None], axis=1), decoded

    def train_step(self, images):
        with tf.GradientTape() as tape:
            patches, decoded = self.reconstruct(self.augmentation(images), training=True)
            total_loss = self.compute_loss(y=patches, y_pred=decoded)
        gradients = tape.gradient(total_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(total_loss)
            else:
                metric.update_state(patches, decoded)
        return {metric.name: metric.result() for metric in self.metrics}


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
)


# Replicas that have no examples of a batch: the last one has a single example.


def one_at_the_end(shape=(6, 6, 2)):
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype("float32")
    return {"x": x, "y": np.arange(8) % 3, "batch_size": 7}


def without_examples(name, *middle, shape=(6, 6, 2), **settings):
    build = classifier(*middle, layers.Flatten, shape=shape, **{"jit_compile": False} | settings)
    on_tensorflow(f"without examples: {name}", build, lambda: one_at_the_end(shape))


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
