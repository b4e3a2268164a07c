"""A batch of fewer sparse examples than replicas: the iterator of a strategy fails."""

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
examples = tf.sparse.from_dense([[1.0, 0.0]])
dataset = tf.data.Dataset.from_tensor_slices(examples).batch(2)

fault = False
try:
    for batch in strategy.experimental_distribute_dataset(dataset):
        print([part.dense_shape.numpy() for part in strategy.experimental_local_results(batch)])
except tf.errors.OpError as error:
    print(str(error).splitlines()[0])
    fault = True

raise SystemExit(int(fault))
