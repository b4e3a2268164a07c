"""oneDNN's kernels on an empty batch; see the page of the same name.

    python docs/upstream/onednn_without_examples.py

It only needs TensorFlow, on x86. The second part aborts the process.
"""

import os

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"  # the default on new CPUs

import numpy as np
import tensorflow as tf

KERNEL = tf.Variable(tf.ones((3, 3, 3, 8)))


@tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 3])])
def convolution(x):
    """Return the shape of a convolution of 7 by 7 positions and 8 channels."""
    return tf.shape(tf.nn.conv2d(x, KERNEL, 1, "VALID"))


@tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 3])])
def gradient_of_pooling(x):
    """Return the gradient of a pooling with respect to its input."""
    return tf.gradients(tf.reduce_sum(tf.sin(tf.nn.max_pool2d(x, 2, 2, "VALID"))), x)[0]


nothing = np.zeros((0, 9, 9, 3), "float32")
shape = convolution(nothing).numpy().tolist()
print("shape of a convolution of an empty batch, which should be [0, 7, 7, 8]:", shape)
print("gradient of a pooling of an empty batch:", flush=True)
print(gradient_of_pooling(nothing).shape)

raise SystemExit(int(shape != [0, 7, 7, 8]))
