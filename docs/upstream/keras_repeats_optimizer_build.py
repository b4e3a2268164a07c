"""What an optimizer assigns in `build` is assigned again in every step, but not on replicas."""

import keras
import numpy as np
import tensorflow as tf


class WithSlowWeights(keras.optimizers.SGD):
    """Keeps a copy of the first weights."""

    def build(self, variables):
        """Copy the weights."""
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, fast in zip(self.slow, variables, strict=True):
            slow.assign(fast)


def kept(strategy):
    """Train for some steps; return how far the copy is from the first weight."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(WithSlowWeights(0.1), "mse", jit_compile=False)
    first = float(model.get_weights()[0][0, 0])
    x = np.ones((8, 1), "float32")
    model.fit(x, x, batch_size=2, verbose=0)
    return abs(float(model.optimizer.slow[0].numpy()[0, 0]) - first)


tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
one = kept(tf.distribute.get_strategy())
two = kept(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
print(f"the copy of the first weights moved by {one} on one device, by {two} on two replicas")

raise SystemExit(int(one > 0 and two == 0))
