"""Two MirroredStrategies of different size in one process: the second one fails."""

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)

fault = False
for count in (2, 3):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])

    @tf.function
    def total(strategy=strategy):
        def sum_of_replicas():
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones(2))

        return strategy.run(sum_of_replicas)

    try:
        print(f"{count} replicas:", strategy.experimental_local_results(total())[0].numpy())
    except tf.errors.OpError as error:
        print(f"{count} replicas: {str(error).splitlines()[0]}")
        fault = True

raise SystemExit(int(fault))
