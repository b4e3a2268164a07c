"""Keras computes a schedule's rate again for each variable of an update. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf  # noqa: F401  # the backend that traces an update of each variable


class Counting(keras.optimizers.schedules.LearningRateSchedule):
    asked = 0

    def __call__(self, step):  # noqa: ARG002
        Counting.asked += 1
        return keras.ops.cast(0.1, "float32")


model = keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1) for _ in range(4))])
model.compile(keras.optimizers.AdamW(Counting()), "mse", jit_compile=False)
model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
print("the schedule is traced", Counting.asked, "times in the graph of one step")

raise SystemExit(int(Counting.asked > 2))
