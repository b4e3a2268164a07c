"""Reading from a tf.data service that is not running waits forever. Run: python FILE"""

import os
import sys
import threading

import tensorflow as tf

distribute = tf.data.experimental.service.distribute("parallel_epochs", "grpc://localhost:1")
error = []


def read():
    try:
        next(iter(tf.data.Dataset.range(3).apply(distribute)))
    except tf.errors.OpError as raised:
        error.append(raised)


reader = threading.Thread(target=read, daemon=True)
reader.start()
reader.join(20)
print("after 20 seconds:", error or "it waits, and nothing listens there", flush=True)
sys.stdout.flush()
os._exit(int(not error))  # the thread cannot be stopped
