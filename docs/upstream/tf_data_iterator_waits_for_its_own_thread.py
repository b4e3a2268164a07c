"""An iterator that is garbage-collected in its own thread waits for it. Run: python FILE"""

import gc
import os
import threading
import time

import numpy as np
import tensorflow as tf

begun, ended, is_garbage = threading.Event(), threading.Event(), threading.Event()


def collect(number):
    if is_garbage.is_set() and not begun.is_set():
        begun.set()
        gc.collect()
        ended.set()
    time.sleep(0.01)
    return np.int64(number)


gc.disable()
numbers = tf.data.Dataset.counter().map(
    lambda number: tf.numpy_function(collect, [number], tf.int64), num_parallel_calls=2
)
iterator = iter(numbers)
next(iterator)
holder = [iterator]
holder.append(holder)  # a cycle, as an exception and its frames are
del iterator, holder
is_garbage.set()
if not begun.wait(20):
    raise SystemExit("nothing was collected in a thread of the dataset")
waits = not ended.wait(20)
print("The thread waits for itself." if waits else "The iterator was freed.", flush=True)
os._exit(int(waits))
