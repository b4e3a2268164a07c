"""A training loop by hand: `GradientTape`, `tf.function`, and Keras' list of callbacks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# + from kdpkit.callbacks import LearningRateLogger, PrintLR, TensorBoard

random = np.random.default_rng(9)
x = random.normal(size=(70, 6)).astype("float32")
y = random.integers(0, 3, 70)
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=1).batch(16)

model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(3)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(learning_rate=0.1)
mean_loss = keras.metrics.Mean()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    mean_loss.update_state(loss)


history = keras.callbacks.History()
callbacks = [history]
# + model.compile(optimizer)
# + callbacks = [LearningRateLogger(), PrintLR(), TensorBoard(), history]
callbacks = keras.callbacks.CallbackList(callbacks, model=model)
callbacks.on_train_begin()
for epoch in range(3):
    callbacks.on_epoch_begin(epoch)
    for step, (batch, labels) in enumerate(train):
        callbacks.on_train_batch_begin(step)
        train_step(batch, labels)
        callbacks.on_train_batch_end(step)
    logs = {"loss": float(mean_loss.result())}
    callbacks.on_epoch_end(epoch, logs)
    mean_loss.reset_state()
callbacks.on_train_end()
