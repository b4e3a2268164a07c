"""Keras clips each replica's gradient, and sums afterwards. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()
x = np.array([[1.0], [1.0], [-1.0], [-0.5]], "float32")
y = np.ones((4, 1), "float32")

steps = []
for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
    with tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction).scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=0.1), "mse", jit_compile=False)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    steps.append(float(model.get_weights()[0][0, 0]))
    print(f"{len(devices)} replica(s): a step of {steps[-1]:.3f}")

raise SystemExit(int(abs(steps[0] - steps[1]) > 1e-4))
