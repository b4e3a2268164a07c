"""Generative models: adversaries, diffusion."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import images, on_tensorflow


def gray_images():
    return {"x": images(channels=1)["x"], "batch_size": 7}


def discriminator():
    stack = [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, strides=2, padding="same")]
    stack += [layers.LeakyReLU(0.2), layers.Dropout(0.3), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential(stack)


def generator(width):
    return keras.Sequential(
        [
            keras.Input((width,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


class GAN(keras.Model):
    """Two adversaries; noise is drawn for two batches in a row, of which a replica has some."""

    def __init__(self, latent_dim=6):
        super().__init__()
        self.latent_dim = latent_dim
        self.discriminator, self.generator = discriminator(), generator(latent_dim)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, images):
        batch_size = ops.shape(images)[0]
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        combined = ops.concatenate([self.generator(noise), images], axis=0)
        truth = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        truth += 0.05 * keras.random.uniform(ops.shape(truth), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))

        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros_like(predictions), predictions)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@on_tensorflow("adversaries", data=gray_images, run="slow")
def gan():
    model, adam = GAN(), keras.optimizers.Adam
    model.compile(adam(3e-4), adam(3e-4), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class Diffusion(keras.Model):
    """Learns to tell noise from images, beside a moving average of its weights."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.augmenter = keras.Sequential([layers.RandomFlip("horizontal")])
        self.network = self.denoiser()
        self.ema_network = keras.models.clone_model(self.network)
        self.seed_generator = keras.random.SeedGenerator(11)

    def denoiser(self):
        noisy, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
        x = layers.Concatenate()([layers.Conv2D(4, 1)(noisy), layers.UpSampling2D(8)(variances)])
        residual = layers.Conv2D(4, 1)(x)
        x = layers.BatchNormalization(center=False, scale=False)(x)
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
        x = layers.Conv2D(1, 1, kernel_initializer="zeros")(layers.Add()([x, residual]))
        return keras.Model([noisy, variances], x)

    def compile(self, **settings):
        super().compile(**settings)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def train_step(self, images):
        images = self.normalizer(self.augmenter(images, training=True), training=True)
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seed_generator)
        angles = 0.3 + times * 1.2
        signal_rates, noise_rates = ops.cos(angles), ops.sin(angles)
        noisy = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            predicted = self.network([noisy, noise_rates**2], training=True)
            noise_loss = self.loss(noises, predicted)
        weights = self.network.trainable_weights
        gradients = tape.gradient(noise_loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, averaged in zip(self.network.weights, self.ema_network.weights, strict=True):
            averaged.assign(0.9 * averaged + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


@on_tensorflow("denoising diffusion", data=gray_images, run="slow")
def diffusion():
    model = Diffusion()
    model.normalizer.adapt(gray_images()["x"])
    adam = keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
    model.compile(optimizer=adam, loss=keras.losses.MeanAbsoluteError())
    return model
