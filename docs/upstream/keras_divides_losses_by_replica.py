"""Keras divides a loss by each replica's count and the number of replicas. Run: python FILE"""

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
reduction = tf.distribute.ReductionToOneDevice()


def step(devices, x, layers, sizes):
    """Return how far one batch of each of these sizes moves the weights."""
    with tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction).scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    ends = np.cumsum(sizes)
    batches = [x[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    data = tf.data.Dataset.from_generator(
        lambda: ((batch, np.ones((*batch.shape[:-1], 1), "float32")) for batch in batches),
        output_signature=(
            tf.TensorSpec((None, *x.shape[1:])),
            tf.TensorSpec((None, *x.shape[1:-1], 1)),
        ),
    )
    model.fit(data, verbose=0)
    return float(model.get_weights()[0].ravel()[0])


rows = np.array([[1.0], [1.0], [1.0], [1.0], [3.0], [3.0], [0.5]], "float32") / 4
sequences = np.array(
    [[1.0, 2.0, 1.0], [2.0, 1.0, 3.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]], "float32"
)
cases = {
    "a last batch of 3 examples": (rows, lambda: [keras.layers.Dense(1, use_bias=False)], [4, 3]),
    "masked sequences": (
        sequences[..., None] / 4,
        lambda: [keras.layers.Masking(), keras.layers.Dense(1, use_bias=False)],
        [4],
    ),
}
differences = []
for name, case in cases.items():
    one, two = (step(devices, *case) for devices in (["CPU:0"], ["CPU:0", "CPU:1"]))
    print(f"{name}: {one:.4f} on one replica, {two:.4f} on two")
    differences.append(abs(one - two) > 1e-5)

raise SystemExit(int(all(differences)))
