"""A generative adversarial network: two optimizers, given to `compile`, and a monitor."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# + from kdpkit import callbacks, pipelines

images = np.random.default_rng(6).uniform(size=(42, 6)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(images).batch(10)  # -
# + settings = pipelines.PipelineConfig(shuffle_buffer=0, remainder="keep")
# + dataset = tf.data.Dataset.from_tensor_slices(images)
# + dataset = pipelines.train_pipeline(dataset, settings, global_batch_size=10)


class GAN(keras.Model):
    def __init__(self, latent_dim=3):
        super().__init__()
        self.latent_dim = latent_dim
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((latent_dim,)), layers.Dense(6)])
        self.seed_generator = keras.random.SeedGenerator(42)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def latent(self, count):
        return keras.random.normal((count, self.latent_dim), seed=self.seed_generator)

    def train_step(self, real):
        count = tf.shape(real)[0]
        both = tf.concat([self.generator(self.latent(count)), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        latent = self.latent(count)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(latent)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 as Keras calls it
        self.model.generator.save_weights(f"generator-{epoch}.weights.h5")


model = GAN()
model.compile(
    d_optimizer=keras.optimizers.Adam(learning_rate=1e-3),
    g_optimizer=keras.optimizers.Adam(learning_rate=3e-3),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
history = model.fit(dataset, epochs=3, callbacks=[Monitor()])  # -
# + history = model.fit(dataset, epochs=3, callbacks=[Monitor(), *callbacks.training_callbacks()])
