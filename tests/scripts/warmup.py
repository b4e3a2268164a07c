"""Warmup and a cosine, as a callback that sets the rate of every batch: many scripts carry one."""

import keras
import numpy as np
from keras import layers

# + from kdpkit import callbacks as kit, schedules

random = np.random.default_rng(8)
x = random.normal(size=(100, 8)).astype("float32")
y = random.integers(0, 3, 100)
EPOCHS, BATCH_SIZE, WARMUP_STEPS, PEAK = 4, 16, 5, 0.1
STEPS = EPOCHS * -(-len(x) // BATCH_SIZE)


def cosine_decay_with_warmup(step):
    if step < WARMUP_STEPS:
        return PEAK * step / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return 0.5 * PEAK * (1 + np.cos(np.pi * done))


class WarmUpCosineDecay(keras.callbacks.Callback):
    step = 0

    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 as Keras calls it
        self.model.optimizer.learning_rate = cosine_decay_with_warmup(self.step)
        self.step += 1


def build_model():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(3)])
    rate = PEAK
    # + rate = schedules.warmup_cosine(PEAK, total_steps=STEPS, warmup_steps=WARMUP_STEPS)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


model = build_model()
callbacks = [WarmUpCosineDecay()]
# + callbacks = [kit.LearningRateLogger(), kit.PrintLR()]
history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, callbacks=callbacks)
