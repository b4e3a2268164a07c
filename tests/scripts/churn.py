"""Customers who leave: a table, `validation_split`, and the callbacks that most scripts have."""

import keras
import numpy as np
from keras import layers
from keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

# + from kdpkit.callbacks import LearningRateLogger, ModelCheckpoint, PrintLR

random = np.random.default_rng(1)
x = random.normal(size=(90, 6)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("float32")


def build_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
    return model


model = build_model()
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=8,
    validation_split=0.2,
    callbacks=[
        # + LearningRateLogger(),
        # + PrintLR(),
        EarlyStopping(patience=3, restore_best_weights=True),
        ReduceLROnPlateau(patience=1, factor=0.5),
        ModelCheckpoint("best.keras", save_best_only=True),
    ],
)
