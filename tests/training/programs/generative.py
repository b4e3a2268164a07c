"""Generative models: autoencoders, adversaries, diffusion."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.training.programs import CustomStep, images, network, program, unlabeled


def gray_images():
    return {"x": images(channels=1)["x"], "batch_size": 7}


class Sampling(layers.Layer):
    """Draws a code from its mean and logarithmic variance."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def code_divergence(mean, log_var):
    return -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=1)


@program("variational autoencoder", gray_images, optimizer="adam")
class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        pixels, code = keras.Input((8, 8, 1)), keras.Input((2,))
        x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(pixels)
        x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
        mean, log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
        self.encoder = keras.Model(pixels, [mean, log_var, Sampling()([mean, log_var])])
        x = layers.Reshape((4, 4, 2))(layers.Dense(32, activation="relu")(code))
        x = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(x)
        self.decoder = keras.Model(code, x)
        names = ("loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, code = self.encoder(data)
            crossentropy = keras.losses.binary_crossentropy(data, self.decoder(code))
            reconstruction_loss = ops.mean(ops.sum(crossentropy, axis=(1, 2)))
            kl_loss = ops.mean(code_divergence(mean, log_var))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        losses = total_loss, reconstruction_loss, kl_loss
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Divergence(Sampling):
    """Adds the divergence of codes to the loss, too."""

    def call(self, inputs):
        self.add_loss(ops.mean(code_divergence(*inputs)))
        return super().call(inputs)


@program("variational autoencoder of layers", lambda: unlabeled() | {"y": unlabeled()["x"]})
def vae_of_layers():
    features = keras.Input((6,))
    x = layers.Dense(16, activation="relu")(features)
    code = Divergence()([layers.Dense(3)(x), layers.Dense(3)(x)])
    model = keras.Model(features, layers.Dense(6)(layers.Dense(16, activation="relu")(code)))
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
    return model


@program("divergence that counts more by step", unlabeled, optimizer="adam")
class Annealing(CustomStep):
    """A variational autoencoder without noise, whose divergence is a sum."""

    def __init__(self):
        super().__init__(network(4))
        self.decoder = network(6, inputs=2)

    def step_loss(self, x):
        weight = 1e-2 * ops.minimum(ops.cast(self.optimizer.iterations, "float32") / 4.0, 1.0)
        mean, log_var = ops.split(self.net(x), 2, axis=-1)
        error = ops.mean(ops.square(self.decoder(mean) - x))
        return error + weight * ops.sum(code_divergence(mean, log_var))


class VectorQuantizer(layers.Layer):
    def __init__(self, count=6, width=4, beta=0.25):
        super().__init__()
        self.count, self.width, self.beta = count, width, beta

    def build(self, _):
        shape = (self.width, self.count)
        self.embeddings = self.add_weight(shape=shape, initializer="random_uniform")

    def call(self, x):
        flat = ops.reshape(x, (-1, self.width))
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(ops.square(self.embeddings), axis=0)
            - 2 * ops.matmul(flat, self.embeddings)
        )
        encodings = ops.one_hot(ops.argmin(distances, axis=1), self.count, dtype=x.dtype)
        quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + ops.stop_gradient(quantized - x)


@program("vector-quantized autoencoder", gray_images, optimizer="adam")
class VQVAE(CustomStep):
    def __init__(self):
        pixels = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, strides=2, activation="relu", padding="same")(pixels)
        x = VectorQuantizer()(layers.Conv2D(4, 1)(x))
        x = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(x)
        super().__init__(keras.Model(pixels, x))

    def step_loss(self, x):
        return ops.mean((x - self.net(x)) ** 2) / 0.08 + sum(self.net.losses)


@program("a codebook of moving averages", unlabeled, optimizer="adam")
class Codebook(CustomStep):
    """A quantizing autoencoder whose codes are moving averages of what is assigned to them."""

    def __init__(self, codes=5):
        super().__init__()
        self.decoder = network(6, inputs=3)
        start = np.random.default_rng(3).normal(size=(codes, 3)).astype("float32")
        self.codes = tf.Variable(start, trainable=False)
        self.counts = tf.Variable(tf.ones(codes), trainable=False)
        self.sums = tf.Variable(start, trainable=False)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            encoded = self.net(x)
            distances = tf.reduce_sum((encoded[:, None] - self.codes[None]) ** 2, axis=-1)
            member = tf.one_hot(tf.argmin(distances, axis=-1), self.codes.shape[0])
            quantized = tf.matmul(member, self.codes)
            passed = encoded + tf.stop_gradient(quantized - encoded)
            commitment = tf.reduce_mean((encoded - tf.stop_gradient(quantized)) ** 2)
            loss = tf.reduce_mean((self.decoder(passed) - x) ** 2) + 0.25 * commitment
        self.update(tape, loss)
        self.counts.assign(0.9 * self.counts + 0.1 * tf.reduce_sum(member, axis=0))
        self.sums.assign(0.9 * self.sums + 0.1 * tf.matmul(member, encoded, transpose_a=True))
        self.codes.assign(self.sums / self.counts[:, None])
        return {"loss": loss}


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
        misleading = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@program("adversaries", gray_images, backends=("tensorflow",))
def gan():
    model, adam = GAN(), keras.optimizers.Adam
    model.compile(adam(3e-4), adam(3e-4), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@program("adversaries with a gradient penalty", gray_images, optimizer="adam")
class WGAN(CustomStep):
    """A critic with a penalty of its gradient, trained more often than the generator."""

    def __init__(self, latent_dim=6, critic_steps=2):
        super().__init__(generator(latent_dim))
        self.critic, self.latent_dim, self.critic_steps = discriminator(), latent_dim, critic_steps
        self.critic_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.seed_generator = keras.random.SeedGenerator(3)

    def generated(self, real):
        shape = (ops.shape(real)[0], self.latent_dim)
        return self(keras.random.normal(shape, seed=self.seed_generator), training=True)

    def gradient_penalty(self, real, fake):
        shape = (ops.shape(real)[0], 1, 1, 1)
        alpha = keras.random.uniform(shape, seed=self.seed_generator)
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            prediction = self.critic(interpolated, training=True)
        gradients = tape.gradient(prediction, [interpolated])[0]
        norm = ops.sqrt(ops.sum(ops.square(gradients), axis=[1, 2, 3]) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generated(real)
                cost = ops.mean(self.critic(fake, training=True))
                cost -= ops.mean(self.critic(real, training=True))
                critic_loss = cost + 10.0 * self.gradient_penalty(real, fake)
            weights = self.critic.trainable_variables
            self.update(tape, critic_loss, weights, self.critic_optimizer)
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.generated(real), training=True))
        self.update(tape, loss, self.net.trainable_variables)
        return {"critic": critic_loss, "loss": loss}


def two_kinds_of_images():
    x = gray_images()["x"]
    return {"x": x, "y": x[::-1] ** 2, "batch_size": 7}


def translator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.GroupNormalization(groups=-1),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )


@program("translation of images by cycles", two_kinds_of_images, optimizer="adam")
class CycleGAN(CustomStep):
    """Two generators, two critics and four optimizers under one tape."""

    def __init__(self):
        super().__init__(translator())
        self.back, self.critic_x, self.critic_y = translator(), discriminator(), discriminator()
        self.others = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(3)]

    def train_step(self, batch):
        x, y = batch
        square, absolute = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.net(x, training=True), self.back(y, training=True)
            real_scores = self.critic_x(x, training=True), self.critic_y(y, training=True)
            fake_scores = self.critic_x(fake_x, training=True), self.critic_y(fake_y, training=True)
            of_x, of_y = (
                square(ops.ones_like(real), real) + square(ops.zeros_like(fake), fake)
                for real, fake in zip(real_scores, fake_scores, strict=True)
            )
            forth = square(ops.ones_like(fake_scores[1]), fake_scores[1])
            forth += 10.0 * absolute(y, self.net(fake_x, training=True))
            back = square(ops.ones_like(fake_scores[0]), fake_scores[0])
            back += 10.0 * absolute(x, self.back(fake_y, training=True))
        self.update(tape, forth, self.net.trainable_variables)
        parts = (self.back, back), (self.critic_x, of_x), (self.critic_y, of_y)
        for optimizer, (model, loss) in zip(self.others, parts, strict=True):
            self.update(tape, loss, model.trainable_variables, optimizer)
        return {"forth": forth, "back": back, "x": of_x, "y": of_y}


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


@program("denoising diffusion", gray_images, backends=("tensorflow",))
def diffusion():
    model = Diffusion()
    model.normalizer.adapt(gray_images()["x"])
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        loss=keras.losses.MeanAbsoluteError(),
    )
    return model
