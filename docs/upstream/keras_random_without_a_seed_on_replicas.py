"""`keras.random` without a seed fails in a step of two replicas. Run: python FILE"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()
two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction).scope


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


failed = []
for name, scope in {"no strategy": contextlib.nullcontext, "two replicas": two}.items():
    with scope():
        model = keras.Sequential([keras.Input((1,)), Noise(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    try:
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
        failed.append(False)
        print(f"{name}: it trains")
    except ValueError as error:
        failed.append(True)
        print(f"{name}: {' '.join(str(error).split())[:160]}")

raise SystemExit(int(failed == [False, True]))
