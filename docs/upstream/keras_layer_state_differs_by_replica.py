"""BatchNormalization's moving statistics differ between replicas. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction)
with strategy.scope():
    layer = keras.layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
model.fit(np.array([[0.0], [0.0], [8.0], [8.0]]), np.ones((4, 1)), shuffle=False, verbose=0)

means = [float(mean[0]) for mean in strategy.experimental_local_results(layer.moving_mean.value)]
print("moving mean of each replica:", means, "and as it is saved:", layer.get_weights()[2])

raise SystemExit(int(means[0] != means[1]))
