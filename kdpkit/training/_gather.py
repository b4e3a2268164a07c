"""`gather_examples`: the examples of all replicas, for what compares examples with each other."""

import keras

from kdpkit.training._tensors import Tensor


def gather_examples(x: Tensor) -> Tensor:
    """Return the examples of all replicas, in the order that they have in the global batch.

    Call it in a `train_step`, a loss or a `per_example_loss` where the examples of a batch meet:
    contrastive learning with in-batch negatives, a Dice loss, a product over the batch. Each
    replica then computes the same value on the global batch, and gradients flow back to the
    replica that has the example. Because a replica's loss counts with its share of the examples,
    and the shares add up to one, a loss of gathered examples is what one device computes as it
    stands. Replicas may have different numbers of examples, or none.

    On one device, outside of a step, and on JAX, where one program computes the global batch, it is
    `x` itself.

    Args:
        x: A tensor of shape `(examples of this replica, ...)`.

    Returns:
        A tensor of shape `(examples of the global batch, ...)`.

    Raises:
        ValueError: `x` is a scalar, or the call is inside a condition, a loop, a `tf.function` of
            its own, or a part of a step that XLA compiles, where replicas cannot meet.

    >>> import numpy as np
    >>> gather_examples(np.array([1.0, 2.0]))
    array([1., 2.])
    """
    if keras.backend.backend() != "tensorflow":
        return x
    from kdpkit.training.tensorflow._collectives import gathered

    return gathered(x)
