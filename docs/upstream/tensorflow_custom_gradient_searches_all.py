"""A custom gradient of a captured tensor searches the graph behind that. Run: python FILE"""

import statistics
import time

import tensorflow as tf


def seconds_of_custom_gradients(calls, operations=100):
    """Time each of some custom gradients in a graph that grows by some operations a call."""
    seconds = []

    @tf.function(autograph=False)
    def step(x):
        captured = x
        for _ in range(calls):
            for _ in range(operations):
                captured = captured + 1.0
            start = time.perf_counter()
            captured = tf.custom_gradient(lambda y, c=captured: (c + y, lambda grad: grad))(x)
            seconds.append(time.perf_counter() - start)
        return captured

    step.get_concrete_function(tf.TensorSpec([]))
    return seconds


seconds = seconds_of_custom_gradients(21)
first, last = statistics.median(seconds[:5]), statistics.median(seconds[-5:])
print(f"a custom gradient in a graph of 300 operations: {first * 1e3:.1f} ms")
print(f"a custom gradient in a graph of 1,900 operations: {last * 1e3:.1f} ms")

raise SystemExit(int(last > 2 * first))
