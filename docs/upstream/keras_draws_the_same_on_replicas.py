"""Keras' Dropout drops the same units on every replica. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)
with strategy.scope():
    dropout = keras.layers.Dropout(0.5, seed=1)

masks = strategy.run(tf.function(lambda: dropout(tf.ones((1, 64)), training=True)))
first, second = (mask.numpy() for mask in strategy.experimental_local_results(masks))
print("the masks of both replicas are equal:", np.array_equal(first, second))

raise SystemExit(int(np.array_equal(first, second)))
