"""On a CPU a dropout takes far longer under XLA than without. Run: python FILE"""

import os
import statistics
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

X = tf.ones([1 << 20])


def dropout(seed):
    return tf.nn.experimental.stateless_dropout(X, 0.1, seed)


def milliseconds(function):
    times = []
    for number in range(6):
        start = time.perf_counter()
        function(tf.constant([3, number])).numpy()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


compiled, plain = (milliseconds(tf.function(dropout, jit_compile=jit)) for jit in (True, False))
print(f"a dropout of a million numbers: {compiled:.1f} ms under XLA, {plain:.1f} ms without")
raise SystemExit(int(compiled > 10 * plain))
