"""Training against another model's outputs, or against what a mask hides."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program


def _labeled_images():
    random = np.random.default_rng(0)
    x = random.uniform(size=(17, 8, 8, 1)).astype("float32")
    return {"x": x, "y": random.integers(0, 4, 17), "batch_size": 7}


def _convnet(width, name):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(width, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
            layers.Conv2D(2 * width, (3, 3), strides=(2, 2), padding="same"),
            layers.Flatten(),
            layers.Dense(4),
        ],
        name=name,
    )


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,  # noqa: ARG002
        training=True,  # noqa: ARG002
    ):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def _distiller():
    teacher = _convnet(8, "teacher")
    teacher.trainable = False
    model = Distiller(student=_convnet(4, "student"), teacher=teacher)
    model.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    return model


class StepDistiller(Distiller):
    """The same by a step of its own, with both losses in the log."""

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = self.distillation_loss_fn(
                ops.softmax(teacher_predictions / self.temperature, axis=1),
                ops.softmax(student_predictions / self.temperature, axis=1),
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, student_predictions)
        results = {m.name: m.result() for m in self.metrics}
        return results | {"student_loss": student_loss, "distillation_loss": distillation_loss}


def _step_distiller():
    model = StepDistiller(student=_convnet(4, "student"), teacher=_convnet(8, "teacher"))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    return model


class MaskedAutoencoder(keras.Model):
    """Sees a quarter of an image's patches, and is asked for the others."""

    def __init__(self, patch_size=2, width=8, mask_proportion=0.75):
        super().__init__()
        self.augmentation = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.RandomCrop(8, 8), layers.RandomFlip("horizontal")]
        )
        self.num_patches = (8 // patch_size) ** 2
        self.num_mask = int(mask_proportion * self.num_patches)
        self.patch_size = patch_size
        self.projection = layers.Dense(width)
        self.positions = layers.Embedding(self.num_patches, width)
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.decoder = layers.Dense(patch_size**2)
        self.mask_token = self.add_weight(shape=(1, 1, width), initializer="random_normal")
        self.seed_generator = keras.random.SeedGenerator(42)

    def patches(self, images):
        patches = ops.image.extract_patches(images, self.patch_size)
        return ops.reshape(patches, (-1, self.num_patches, self.patch_size**2))

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
            images = self.augmentation(images)
            patches, decoded = self.reconstruct(images, training=True)
            total_loss = self.compute_loss(y=patches, y_pred=decoded)
        gradients = tape.gradient(total_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(total_loss)
            else:
                metric.update_state(patches, decoded)
        return {metric.name: metric.result() for metric in self.metrics}


def _masked_autoencoder():
    model = MaskedAutoencoder()
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=5e-3, weight_decay=1e-4),
        loss=keras.losses.MeanSquaredError(),
        metrics=["mae"],
    )
    return model


class MaskedLanguageModel(keras.Model):
    """A step of its own around a loss that keeps one number a token."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def tracked_loss(self, labels, predictions, sample_weight):
        loss = self.loss_fn(labels, predictions, sample_weight=sample_weight)
        self.loss_tracker.update_state(loss, sample_weight=sample_weight)
        return loss

    def train_step(self, inputs):
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            loss = self.tracked_loss(labels, self(features, training=True), sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": self.loss_tracker.result()}


class MeanMaskedLanguageModel(MaskedLanguageModel):
    def tracked_loss(self, labels, predictions, sample_weight):
        return ops.mean(super().tracked_loss(labels, predictions, sample_weight))


def _masked_language_model(model=MaskedLanguageModel):
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(12, 8)(inputs) + layers.Embedding(6, 8)(ops.arange(6))
    attended = layers.Dropout(0.1)(layers.MultiHeadAttention(2, 4)(x, x, x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + attended)
    outputs = layers.Dense(12, activation="softmax")(x)
    model = model(inputs, outputs, name="masked_bert_model")
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3))
    return model


def _masked_tokens():
    random = np.random.default_rng(0)
    tokens = random.integers(2, 12, (17, 6))
    hidden = random.uniform(size=tokens.shape) < 0.3
    x = np.where(hidden, 1, tokens)
    return {"x": x, "y": tokens, "sample_weight": hidden.astype("float32"), "batch_size": 7}


_TENSORFLOW = ("tensorflow",)

PROGRAMS = [
    Program("distillation by compute_loss", _distiller, _labeled_images),
    Program("distillation by train_step", _step_distiller, _labeled_images, _TENSORFLOW),
    Program(
        "masked autoencoder",
        _masked_autoencoder,
        lambda: {"x": _labeled_images()["x"], "batch_size": 7},
        _TENSORFLOW,
    ),
    Program(
        "masked language model with an unreduced loss in its own step",
        _masked_language_model,
        _masked_tokens,
        _TENSORFLOW,
    ),
    Program(
        "masked language model with the mean loss in its own step",
        lambda: _masked_language_model(MeanMaskedLanguageModel),
        _masked_tokens,
        _TENSORFLOW,
    ),
]
