"""Keras' loss scaling only skips a step if the first replica overflows."""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()
x = np.array([[1.0], [1.0], [1.0], [np.inf]], "float32")

finite = []
for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
    with tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, np.ones((4, 1), "float32"), batch_size=4, shuffle=False, verbose=0)
    finite.append(bool(np.isfinite(model.get_weights()[0]).all()))
    print(f"{len(devices)} replica(s): the weights are {'finite' if finite[-1] else 'NaN'}")

raise SystemExit(int(finite == [True, False]))
