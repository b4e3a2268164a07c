"""The graph of a function with a custom gradient is never freed. Run: python FILE"""

import gc
import weakref

import tensorflow as tf


def graph_of(function):
    """Trace a function, and return a weak reference to its graph."""
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec([]))
    return weakref.ref(concrete.graph)


@tf.custom_gradient
def square(x):
    return x * x, lambda upstream: 2.0 * x * upstream


plain, custom = graph_of(lambda x: x * x), graph_of(lambda x: square(x))
gc.collect()
print("the graph without a custom gradient is kept:", plain() is not None)
print("the graph with one is kept:", custom() is not None)

raise SystemExit(int(custom() is not None))
