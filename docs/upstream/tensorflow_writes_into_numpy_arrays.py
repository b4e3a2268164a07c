"""Keras' `fit` on two replicas overwrites the user's labels. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()


def aligned(shape):
    """Return ones at an address aligned to 64 bytes, as for many large NumPy arrays."""
    memory = np.empty(np.prod(shape) * 4 + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + np.prod(shape) * 4].view("float32").reshape(shape)
    array[:] = 1.0
    return array


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return x[index * 32 : (index + 1) * 32], y[index * 32 : (index + 1) * 32]


for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
    x, y = aligned((128, 16)), aligned((128, 1))
    with tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(Batches(), shuffle=False, verbose=0)
    print(f"{len(devices)} replica(s): {np.sum(y != 1.0)} of 128 labels were overwritten")

raise SystemExit(int(np.sum(y != 1.0) > 0))
