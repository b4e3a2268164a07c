"""A variational autoencoder: a subclass with a `train_step` and metrics of its own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

# + from kdpkit.callbacks import training_callbacks

digits = np.random.default_rng(5).uniform(size=(50, 12)).astype("float32")


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        inputs = keras.Input((12,))
        hidden = layers.Dense(8, activation="relu")(inputs)
        mean, log_var = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        self.encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(12, "sigmoid")])
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            error = keras.losses.binary_crossentropy(data, self.decoder(z))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = ops.mean(error) + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}


model = VAE()
model.compile(optimizer=keras.optimizers.Adam())
history = model.fit(digits, epochs=3, batch_size=16)  # -
# + history = model.fit(digits, epochs=3, batch_size=16, callbacks=training_callbacks("logs"))
