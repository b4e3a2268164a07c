"""Fine-tuning: the head of a frozen network first, then all of it, compiled again."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# + from kdpkit.callbacks import PrintLR, Resume

random = np.random.default_rng(4)
images = random.normal(size=(40, 8, 8, 3)).astype("float32")
labels = random.integers(0, 2, 40)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).cache()
train_ds = dataset.take(30).shuffle(30, seed=123, reshuffle_each_iteration=False)
train_ds = train_ds.batch(8).prefetch(tf.data.AUTOTUNE)
val_ds = dataset.skip(30).batch(8)


def build_model():
    base = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
        ],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))


def compile_model(model, learning_rate):
    model.compile(
        optimizer=keras.optimizers.RMSprop(learning_rate=learning_rate),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )


callbacks = [keras.callbacks.TerminateOnNaN()]
# + resume = Resume("states")
# + train_ds = resume.track(train_ds)
# + callbacks += [PrintLR(), resume]
model = build_model()
compile_model(model, 1e-2)
history = model.fit(train_ds, epochs=2, validation_data=val_ds, callbacks=callbacks)

model.get_layer("base").trainable = True
compile_model(model, 1e-3)
history = model.fit(
    train_ds,
    epochs=4,
    initial_epoch=history.epoch[-1] + 1,
    validation_data=val_ds,
    callbacks=callbacks,
)
