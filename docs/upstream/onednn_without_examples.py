"""oneDNN's kernels on no examples; see the page of the same name.

    python docs/upstream/onednn_without_examples.py

It needs TensorFlow alone. The second part ends the process.
"""

import numpy as np
import tensorflow as tf

KERNEL = tf.Variable(tf.ones((3, 3, 3, 8)))


@tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 3])])
def convolution(x):
    """Give the shape of a convolution of 7 by 7 places and 8 channels."""
    return tf.shape(tf.nn.conv2d(x, KERNEL, 1, "VALID"))


@tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 3])])
def gradient_of_pooling(x):
    """Give the gradient of a pooling by its input."""
    return tf.gradients(tf.reduce_sum(tf.sin(tf.nn.max_pool2d(x, 2, 2, "VALID"))), x)[0]


nothing = np.zeros((0, 9, 9, 3), "float32")
print(
    "shape of a convolution of nothing, which should be 0, 7, 7, 8:", convolution(nothing).numpy()
)
print("gradient of a pooling of nothing:", flush=True)
print(gradient_of_pooling(nothing).shape)
