"""Images: segmentation, classification with augmentation, detection."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def _random():
    return np.random.default_rng(0)


def _images(random, rows=17):
    return random.uniform(size=(rows, 8, 8, 3)).astype("float32")


def _pictures(classes=4):
    random = _random()
    return {"x": _images(random), "y": random.integers(0, classes, 17), "batch_size": 7}


def _one_hot_pictures():
    data = _pictures()
    return data | {"y": np.eye(4, dtype="float32")[data["y"]]}


def _convolutions(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
    return x


def dice_loss(y_true, y_pred, smooth=1.0):
    y_true, y_pred = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    intersection = ops.sum(y_true * y_pred)
    dice = (2.0 * intersection + smooth) / (ops.sum(y_true) + ops.sum(y_pred) + smooth)
    return 1 - dice


def _unet_of_dice():
    inputs = keras.Input((8, 8, 3))
    skip = _convolutions(inputs, 4)
    x = _convolutions(layers.MaxPooling2D()(skip), 8)
    x = layers.Conv2DTranspose(4, 2, strides=2, padding="same")(x)
    x = _convolutions(layers.Concatenate()([x, skip]), 4)
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=dice_loss)
    return model


def _organs():
    random = _random()
    masks = (random.uniform(size=(17, 8, 8, 1)) < 0.3).astype("float32")
    return {"x": _images(random), "y": masks, "batch_size": 7}


def _unet():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
    x = previous = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.BatchNormalization()(layers.SeparableConv2D(8, 3, padding="same")(x))
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = layers.add([x, layers.Conv2D(8, 1, strides=2, padding="same")(previous)])
    for filters in (8, 4):
        x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.UpSampling2D(2)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def _pets():
    random = _random()
    masks = random.integers(0, 3, (17, 8, 8, 1)).astype("uint8")
    return {"x": _images(random), "y": masks, "batch_size": 7}


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


def _mlp(x, hidden_units, dropout_rate):
    for units in hidden_units:
        x = layers.Dropout(dropout_rate)(layers.Dense(units, activation=keras.activations.gelu)(x))
    return x


def _vision_transformer():
    inputs = keras.Input((8, 8, 3))
    normalization = layers.Normalization()
    normalization.adapt(_pictures()["x"])
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
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=8, dropout=0.1)(x1, x1)
    x2 = layers.Add()([attended, x])
    x3 = _mlp(layers.LayerNormalization(epsilon=1e-6)(x2), [16, 8], 0.1)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x3, x2]))
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    model = keras.Model(inputs, layers.Dense(4)(_mlp(x, [16], 0.5)))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
        ],
    )
    return model


def _convnet(model=keras.Model, noise=False):
    inputs = keras.Input((8, 8, 3))
    x = layers.GaussianNoise(0.1)(inputs) if noise else inputs
    x = layers.Conv2D(8, 3, activation="relu")(x)
    x = layers.SpatialDropout2D(0.2)(x) if noise else layers.BatchNormalization()(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    if noise:
        x = layers.AlphaDropout(0.1)(layers.Dense(8, activation="selu")(x))
        x = layers.GaussianDropout(0.2)(layers.Dense(8, activation="relu")(x))
    return model(inputs, layers.Dense(4, activation="softmax")(x))


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
        images = ops.cast(images, share.dtype)
        labels = ops.cast(labels, share.dtype)
        images = images * x_share + ops.take(images, order, axis=0) * (1 - x_share)
        labels = labels * share + ops.take(labels, order, axis=0) * (1 - share)
        return super().train_step((images, labels))


def _compiled(model):
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    return model


def _mix_up(first, second, alpha=0.2):
    """Mix two batches, as a stage of the data."""
    (images_one, labels_one), (images_two, labels_two) = first, second
    batch_size = tf.shape(images_one)[0]
    gamma_1 = tf.random.stateless_gamma([batch_size], seed=[1, 2], alpha=alpha)
    gamma_2 = tf.random.stateless_gamma([batch_size], seed=[3, 4], alpha=alpha)
    share = gamma_1 / (gamma_1 + gamma_2)
    x_share, y_share = tf.reshape(share, (-1, 1, 1, 1)), tf.reshape(share, (-1, 1))
    return (
        images_one * x_share + images_two * (1 - x_share),
        labels_one * y_share + labels_two * (1 - y_share),
    )


def _cut_mix(first, second):
    """Put a box of one image into another; labels count with the areas."""
    (image_one, label_one), (image_two, label_two) = first, second
    share = tf.random.stateless_uniform([], seed=[1, 2])
    size = tf.cast(8 * tf.sqrt(1 - share), tf.int32)
    corner = tf.random.stateless_uniform([2], seed=[3, 4], maxval=8, dtype=tf.int32)
    low, high = tf.maximum(corner - size // 2, 0), tf.minimum(corner + size // 2, 8)
    rows, columns = tf.range(8)[:, None, None], tf.range(8)[None, :, None]
    inside = (rows >= low[0]) & (rows < high[0]) & (columns >= low[1]) & (columns < high[1])
    share = 1 - tf.reduce_mean(tf.cast(inside, tf.float32))
    return tf.where(inside, image_two, image_one), share * label_one + (1 - share) * label_two


def _two_datasets():
    data = _one_hot_pictures()
    dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    return tf.data.Dataset.zip((dataset.shuffle(17, seed=1), dataset.shuffle(17, seed=2)))


def _mixed_batches():
    zipped = _two_datasets().batch(7)
    return {"x": zipped.map(_mix_up)}


def _cut_images():
    return {"x": _two_datasets().map(_cut_mix).batch(7)}


class BoxLoss(keras.losses.Loss):
    """Smooth L1."""

    def __init__(self, delta=1.0):
        super().__init__(reduction=None, name="box_loss")
        self.delta = delta

    def call(self, y_true, y_pred):
        difference = ops.abs(y_true - y_pred)
        loss = ops.where(
            difference < self.delta, 0.5 * ops.square(difference), difference - 0.5 * self.delta
        )
        return ops.sum(loss, axis=-1)


class ClassLoss(keras.losses.Loss):
    """Focal loss."""

    def __init__(self, alpha=0.25, gamma=2.0):
        super().__init__(reduction=None, name="class_loss")
        self.alpha = alpha
        self.gamma = gamma

    def call(self, y_true, y_pred):
        cross_entropy = -(
            y_true * ops.log_sigmoid(y_pred) + (1 - y_true) * ops.log_sigmoid(-y_pred)
        )
        probs = ops.sigmoid(y_pred)
        alpha = ops.where(y_true == 1.0, self.alpha, 1.0 - self.alpha)
        pt = ops.where(y_true == 1.0, probs, 1 - probs)
        return ops.sum(alpha * ops.power(1.0 - pt, self.gamma) * cross_entropy, axis=-1)


class DetectionLoss(keras.losses.Loss):
    """Boxes and classes of all anchors, over the number of anchors with an object."""

    def __init__(self, num_classes=3, delta=1.0):
        super().__init__(name="DetectionLoss")
        self.class_loss = ClassLoss()
        self.box_loss = BoxLoss(delta)
        self.num_classes = num_classes

    def call(self, y_true, y_pred):
        y_pred = ops.cast(y_pred, keras.config.floatx())
        box_labels, class_labels = y_true[:, :, :4], y_true[:, :, 4]
        one_hot = ops.one_hot(ops.cast(class_labels, "int32"), self.num_classes, dtype=y_pred.dtype)
        positive = ops.cast(class_labels > -1.0, y_pred.dtype)
        ignored = ops.equal(class_labels, -2.0)
        class_loss = self.class_loss(one_hot, y_pred[:, :, 4:])
        box_loss = self.box_loss(box_labels, y_pred[:, :, :4])
        class_loss = ops.where(ignored, 0.0, class_loss)
        box_loss = ops.where(positive > 0, box_loss, 0.0)
        normalizer = ops.sum(positive, axis=-1)
        class_loss = ops.divide_no_nan(ops.sum(class_loss, axis=-1), normalizer)
        box_loss = ops.divide_no_nan(ops.sum(box_loss, axis=-1), normalizer)
        return class_loss + box_loss


def _retina():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    bias = keras.initializers.Constant(-np.log((1 - 0.01) / 0.01))
    boxes = layers.Reshape((-1, 4))(layers.Conv2D(2 * 4, 3, padding="same")(x))
    classes = layers.Conv2D(2 * 3, 3, padding="same", bias_initializer=bias)(x)
    outputs = layers.Concatenate(axis=-1)([boxes, layers.Reshape((-1, 3))(classes)])
    model = keras.Model(inputs, outputs)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [2.5e-3, 1e-2, 2.5e-3])
    model.compile(
        loss=DetectionLoss(), optimizer=keras.optimizers.SGD(learning_rate=rate, momentum=0.9)
    )
    return model


def _anchors(random, rows=17):
    classes = random.choice([-2.0, -1.0, 0.0, 1.0, 2.0], (rows, 8))
    return random.normal(size=(rows, 8, 4)).astype("float32"), classes.astype("float32")


def _objects():
    random = _random()
    boxes, classes = _anchors(random)
    y = np.concatenate([boxes, classes[..., None]], axis=-1)
    return {"x": _images(random), "y": y, "batch_size": 7}


def batch_normalized_box_loss(y_true, y_pred):
    """Boxes of the anchors with an object, over their number in the batch."""
    boxes, positive = y_true[..., :4], y_true[..., 4]
    losses = ops.sum(ops.abs(boxes - y_pred), axis=-1) * positive
    return ops.sum(losses) / ops.maximum(ops.sum(positive), 1.0)


def _two_headed_detector():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    boxes = layers.Reshape((8, 4), name="boxes")(layers.Conv2D(8, 1)(x))
    classes = layers.Reshape((8, 3), name="classes")(layers.Conv2D(6, 1)(x))
    model = keras.Model(inputs, {"boxes": boxes, "classes": classes})
    model.compile(
        optimizer=keras.optimizers.Adam(5e-4, global_clipnorm=10.0),
        loss={
            "boxes": batch_normalized_box_loss,
            "classes": keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, ignore_class=-1
            ),
        },
        loss_weights={"boxes": 2.0, "classes": 1.0},
    )
    return model


def _boxes_and_classes():
    random = _random()
    boxes, classes = _anchors(random)
    classes = np.maximum(classes, -1)
    boxes = np.concatenate([boxes, classes[..., None] > -1], axis=-1).astype("float32")
    y = {"boxes": boxes, "classes": classes.astype("int32")}
    return {"x": _images(random), "y": y, "batch_size": 7}


_TENSORFLOW = ("tensorflow",)

PROGRAMS = [
    Program("U-Net with a Dice loss", _unet_of_dice, _organs),
    Program("U-Net with cross-entropy", _unet, _pets),
    Program(
        "vision transformer with augmentation",
        _vision_transformer,
        _pictures,
        # Keras' augmentation computes in float32 alone, and the bias of attention's keys has no
        # gradient but rounding, which AdamW scales up to whole steps.
        tolerance=2e-2,
    ),
    Program(
        "mixup in the step",
        lambda: _compiled(_convnet(MixupModel)),
        _one_hot_pictures,
        _TENSORFLOW,
    ),
    Program("mixup in the data", lambda: _compiled(_convnet()), _mixed_batches),
    Program("CutMix in the data", lambda: _compiled(_convnet()), _cut_images),
    Program("detector with a focal loss", _retina, _objects),
    Program("detector with losses by output", _two_headed_detector, _boxes_and_classes),
    Program(
        "convnet with noise and dropouts",
        lambda: _compiled(_convnet(noise=True)),
        _one_hot_pictures,
    ),
]
