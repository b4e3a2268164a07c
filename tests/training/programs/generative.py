"""Generative models: autoencoders, adversaries, diffusion."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import Program

_TENSORFLOW = ("tensorflow",)


def _images():
    x = np.random.default_rng(0).uniform(size=(17, 8, 8, 1)).astype("float32")
    return {"x": x, "batch_size": 7}


def _labeled():
    return {**_images(), "y": np.eye(3, dtype="float32")[np.arange(17) % 3]}


class Sampling(layers.Layer):
    """Draws a code from its mean and logarithmic variance."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def _encoder():
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(images)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    mean, log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
    return keras.Model(images, [mean, log_var, Sampling()([mean, log_var])])


def _decoder():
    code = keras.Input((2,))
    x = layers.Reshape((4, 4, 2))(layers.Dense(32, activation="relu")(code))
    x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    return keras.Model(code, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _encoder(), _decoder()
        self.trackers = [
            keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")
        ]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, code = self.encoder(data)
            crossentropy = keras.losses.binary_crossentropy(data, self.decoder(code))
            reconstruction_loss = ops.mean(ops.sum(crossentropy, axis=(1, 2)))
            kl_loss = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        losses = total_loss, reconstruction_loss, kl_loss
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def _vae():
    model = VAE()
    model.compile(keras.optimizers.Adam())
    return model


class Divergence(layers.Layer):
    """Adds the divergence of codes to the loss, and draws one."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_var = inputs
        divergence = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=1)
        self.add_loss(ops.mean(divergence))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def _vae_of_layers():
    pixels = keras.Input((8, 8, 1))
    x = layers.Dense(16, activation="relu")(layers.Flatten()(pixels))
    code = Divergence()([layers.Dense(3)(x), layers.Dense(3)(x)])
    x = layers.Dense(64, activation="sigmoid")(layers.Dense(16, activation="relu")(code))
    model = keras.Model(pixels, layers.Reshape((8, 8, 1))(x))
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
    return model


class VectorQuantizer(layers.Layer):
    def __init__(self, count=6, width=4, beta=0.25):
        super().__init__()
        self.count, self.width, self.beta = count, width, beta

    def build(self, _):
        shape = (self.width, self.count)
        self.embeddings = self.add_weight(shape=shape, initializer="random_uniform")

    def call(self, x):
        flat = ops.reshape(x, (-1, self.width))
        similarity = ops.matmul(flat, self.embeddings)
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(ops.square(self.embeddings), axis=0)
            - 2 * similarity
        )
        encodings = ops.one_hot(ops.argmin(distances, axis=1), self.count, dtype=x.dtype)
        quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + ops.stop_gradient(quantized - x)


class VQVAE(keras.Model):
    def __init__(self):
        super().__init__()
        images = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, strides=2, activation="relu", padding="same")(images)
        x = VectorQuantizer()(layers.Conv2D(4, 1)(x))
        x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
        self.vqvae = keras.Model(images, layers.Conv2DTranspose(1, 3, padding="same")(x))
        self.variance = 0.08
        self.total_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total_loss]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            reconstruction_loss = ops.mean((x - reconstructions) ** 2) / self.variance
            total_loss = reconstruction_loss + sum(self.vqvae.losses)
        grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
        self.total_loss.update_state(total_loss)
        return {"loss": self.total_loss.result()}


def _vqvae():
    model = VQVAE()
    model.compile(keras.optimizers.Adam())
    return model


def _discriminator(channels=1, *, normalized=False):
    stack = [keras.Input((8, 8, channels)), layers.Conv2D(4, 3, strides=2, padding="same")]
    stack += [layers.BatchNormalization()] if normalized else []
    stack += [layers.LeakyReLU(0.2), layers.Dropout(0.3), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential(stack)


def _generator(width):
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
    """Two adversaries; labels may be a condition."""

    def __init__(self, classes=0, latent_dim=6):
        super().__init__()
        self.classes, self.latent_dim = classes, latent_dim
        self.discriminator = _discriminator(1 + classes)
        self.generator = _generator(latent_dim + classes)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def with_condition(self, images, labels):
        if not self.classes:
            return images
        planes = ops.broadcast_to(labels[:, None, None], (*ops.shape(images)[:3], self.classes))
        return ops.concatenate([images, ops.cast(planes, images.dtype)], axis=-1)

    def noise(self, batch_size, labels):
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        return ops.concatenate([noise, labels], axis=1) if self.classes else noise

    def label_noise(self, batch_size):
        return keras.random.uniform((2 * batch_size, 1), seed=self.seed_generator)

    def train_step(self, data):
        images, labels = data if isinstance(data, tuple) else (data, None)
        batch_size = ops.shape(images)[0]
        generated = self.with_condition(self.generator(self.noise(batch_size, labels)), labels)
        combined = ops.concatenate([generated, self.with_condition(images, labels)], axis=0)
        truth = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        if not self.classes:
            truth += 0.05 * self.label_noise(batch_size)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))

        noise, misleading = self.noise(batch_size, labels), ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            fakes = self.with_condition(self.generator(noise), labels)
            g_loss = self.loss_fn(misleading, self.discriminator(fakes))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class GANWithNoiseByExample(GAN):
    def label_noise(self, batch_size):
        of_each = keras.random.uniform((batch_size, 2), seed=self.seed_generator)
        return ops.reshape(ops.transpose(of_each), (-1, 1))


def _gan(classes=0, kind=GAN):
    model = kind(classes)
    adam = keras.optimizers.Adam
    model.compile(adam(3e-4), adam(3e-4), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class WGAN(keras.Model):
    """A critic with a penalty of its gradient, trained more often than the generator."""

    def __init__(self, latent_dim=6, critic_steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = _discriminator(), _generator(latent_dim)
        self.latent_dim, self.d_steps, self.gp_weight = latent_dim, critic_steps, gp_weight
        self.seed_generator = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, batch_size, real, fake):
        alpha = keras.random.uniform((batch_size, 1, 1, 1), seed=self.seed_generator)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            prediction = self.discriminator(interpolated, training=True)
        gradients = tape.gradient(prediction, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=[1, 2, 3]) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        batch_size = ops.shape(real)[0]
        for _ in range(self.d_steps):
            noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real, training=True)
                d_cost = ops.mean(fake_logits) - ops.mean(real_logits)
                penalty = self.gradient_penalty(batch_size, real, fake)
                d_loss = d_cost + self.gp_weight * penalty
            weights = self.discriminator.trainable_variables
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            fake_logits = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = -ops.mean(fake_logits)
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def _wgan():
    model = WGAN()
    adam = {"learning_rate": 2e-4, "beta_1": 0.5, "beta_2": 0.9}
    model.compile(keras.optimizers.Adam(**adam), keras.optimizers.Adam(**adam))
    return model


def _translator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.GroupNormalization(groups=-1),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )


class CycleGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.gen_g, self.gen_f = _translator(), _translator()
        self.disc_x, self.disc_y = _discriminator(), _discriminator()

    def compile(self, make_optimizer):
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer = make_optimizer(), make_optimizer()
        self.disc_x_optimizer, self.disc_y_optimizer = make_optimizer(), make_optimizer()
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.adversarial_loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, batch):
        real_x, real_y = batch
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(real_x, training=True), self.gen_f(real_y, training=True)
            cycled_x, cycled_y = (
                self.gen_f(fake_y, training=True),
                self.gen_g(fake_x, training=True),
            )
            disc_real_x, disc_fake_x = (self.disc_x(x, training=True) for x in (real_x, fake_x))
            disc_real_y, disc_fake_y = (self.disc_y(y, training=True) for y in (real_y, fake_y))
            adversarial, cycle = self.adversarial_loss_fn, self.cycle_loss_fn
            gen_g_loss = adversarial(ops.ones_like(disc_fake_y), disc_fake_y)
            gen_g_loss += 10.0 * cycle(real_y, cycled_y)
            gen_f_loss = adversarial(ops.ones_like(disc_fake_x), disc_fake_x)
            gen_f_loss += 10.0 * cycle(real_x, cycled_x)
            disc_x_loss = adversarial(ops.ones_like(disc_real_x), disc_real_x)
            disc_x_loss += adversarial(ops.zeros_like(disc_fake_x), disc_fake_x)
            disc_y_loss = adversarial(ops.ones_like(disc_real_y), disc_real_y)
            disc_y_loss += adversarial(ops.zeros_like(disc_fake_y), disc_fake_y)
        for model, loss, optimizer in (
            (self.gen_g, gen_g_loss, self.gen_g_optimizer),
            (self.gen_f, gen_f_loss, self.gen_f_optimizer),
            (self.disc_x, disc_x_loss, self.disc_x_optimizer),
            (self.disc_y, disc_y_loss, self.disc_y_optimizer),
        ):
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"g": gen_g_loss, "f": gen_f_loss, "x": disc_x_loss, "y": disc_y_loss}


def _cycle_gan():
    model = CycleGAN()
    model.compile(lambda: keras.optimizers.Adam(2e-4, beta_1=0.5))
    return model


class Diffusion(keras.Model):
    """Learns to tell noise from images, beside a moving average of its weights."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.augmenter = keras.Sequential([layers.RandomFlip("horizontal")])
        self.network = _unet()
        self.ema_network = keras.models.clone_model(self.network)
        self.seed_generator = keras.random.SeedGenerator(11)

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


def _unet():
    noisy, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    x = layers.Conv2D(4, 1)(noisy)
    x = layers.Concatenate()([x, layers.UpSampling2D(8)(variances)])
    residual = layers.Conv2D(4, 1)(x)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
    x = layers.Add()([x, residual])
    return keras.Model([noisy, variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


def _diffusion():
    model = Diffusion()
    model.normalizer.adapt(_images()["x"])
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        loss=keras.losses.MeanAbsoluteError(),
    )
    return model


def _pairs():
    x = _images()["x"]
    return {"x": x, "y": x[::-1] ** 2, "batch_size": 7}


def _autoencoded():
    x = _images()["x"]
    return {"x": x, "y": x, "batch_size": 7}


PROGRAMS = [
    Program("variational autoencoder", _vae, _images, _TENSORFLOW),
    Program("variational autoencoder of layers", _vae_of_layers, _autoencoded),
    Program("vector-quantized autoencoder", _vqvae, _images, _TENSORFLOW),
    Program(
        "adversaries",  # noise for two batches in a row, of which a replica has a part of each
        _gan,
        _images,
        _TENSORFLOW,
    ),
    Program(
        "adversaries with noise for each example",
        lambda: _gan(kind=GANWithNoiseByExample),
        _images,
        _TENSORFLOW,
    ),
    Program("conditional adversaries", lambda: _gan(3), _labeled, _TENSORFLOW),
    Program("adversaries with a gradient penalty", _wgan, _images, _TENSORFLOW),
    Program("translation of images by cycles", _cycle_gan, _pairs, _TENSORFLOW),
    Program("denoising diffusion", _diffusion, _images, _TENSORFLOW),
]
