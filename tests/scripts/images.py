"""A small residual network: augmentation layers, and a rate that falls by a table of epochs."""

import keras
import numpy as np
from keras import layers
from keras.callbacks import LearningRateScheduler, ModelCheckpoint, ReduceLROnPlateau

# + from kdpkit.callbacks import training_callbacks

random = np.random.default_rng(3)
x_train = random.integers(0, 256, (50, 8, 8, 3)).astype("uint8")
y_train = keras.utils.to_categorical(random.integers(0, 3, 50), 3)


def lr_schedule(epoch):
    return 1e-2 if epoch < 2 else 1e-3


def residual(x, filters):
    y = layers.Conv2D(filters, 3, padding="same", kernel_regularizer="l2")(x)
    y = layers.Activation("relu")(layers.BatchNormalization()(y))
    y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y))
    return layers.Activation("relu")(layers.add([x, y]))


def build_model():
    inputs = keras.Input((8, 8, 3))
    x = layers.RandomTranslation(0.1, 0.1)(layers.RandomFlip("horizontal")(inputs))
    x = layers.Conv2D(4, 3, padding="same")(layers.Rescaling(1 / 255)(x))
    x = layers.GlobalAveragePooling2D()(residual(x, 4))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    optimizer = keras.optimizers.SGD(learning_rate=lr_schedule(0), momentum=0.9)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


model = build_model()
checkpoint = ModelCheckpoint("model-{epoch:02d}.keras", monitor="val_accuracy")
lr_scheduler = LearningRateScheduler(lr_schedule)
lr_reducer = ReduceLROnPlateau(factor=0.3, cooldown=0, patience=5, min_lr=0.5e-6)
callbacks = [checkpoint, lr_reducer, lr_scheduler]
# + callbacks += training_callbacks("logs", global_batch_size=16)
history = model.fit(
    x_train[:40],
    y_train[:40],
    batch_size=16,
    epochs=3,
    validation_data=(x_train[40:], y_train[40:]),
    shuffle=True,
    callbacks=callbacks,
)
