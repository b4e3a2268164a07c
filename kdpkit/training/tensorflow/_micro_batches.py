"""Micro-batches: a batch is computed some examples at a time, to need less memory.

Each is divided over the devices as a batch is. Layers and losses that compare examples are
rejected, because a micro-batch has only some of the examples.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _library_layers
from kdpkit.training.tensorflow._global_batches import sliced
from kdpkit.training.tensorflow._keras_internals import GLOBAL_SEED_GENERATOR, global_state
from kdpkit.training.tensorflow._layer_trial import Calling
from kdpkit.training.tensorflow._policy import Policy, reject_mixing
from kdpkit.training.tensorflow._split import with_unknown_length

T = TypeVar("T")  # `Sums`, or a nest of tensors to add up


def over_micro_batches(
    compute: Callable[[Any, Any], T], batch: Any, *, num_examples: Any, micro_batches: int
) -> T:
    """Add up the results of a batch's micro-batches, computed one after the other.

    Their sizes differ by one example at most, and none is empty. `compute` gets a micro-batch and
    its position in the batch.
    """
    if micro_batches == 1:
        return compute(batch, 0)
    count = tf.minimum(micro_batches, tf.maximum(num_examples, 1))

    def compute_one(index: Any) -> T:
        with tf.device("CPU:0"):  # where the batch is
            start, stop = (num_examples * i // count for i in (index, index + 1))
            leaves = [with_unknown_length(sliced(x, start, stop)) for x in tf.nest.flatten(batch)]
        return compute(tf.nest.pack_sequence_as(batch, leaves), start)

    first = compute_one(tf.constant(0))
    _, sums = tf.while_loop(
        lambda index, _: index < count,
        lambda index, sums: (index + 1, tf.nest.map_structure(add, sums, compute_one(index))),
        (tf.constant(1), first),
        shape_invariants=(tf.TensorSpec((), tf.int32), tf.nest.map_structure(_spec_of_sum, first)),
        parallel_iterations=1,  # More would be in memory at the same time.
    )
    return sums


def add(total: Any, addend: Any) -> Any:
    """Add gradients; sparse ones stay sparse, because optimizers treat these differently."""
    if isinstance(total, tf.IndexedSlices) and isinstance(addend, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, addend.values], axis=0),
            tf.concat([total.indices, addend.indices], axis=0),
            total.dense_shape,
        )
    return tf.add_n([total, addend])


def seed_generators_of(model: keras.Model) -> list[Any]:
    """Return the generators of seeds that a model's layers draw from, and Keras' global one."""
    generators = [seed for layer in model._flatten_layers() for seed in layer._seed_generators]
    generators.append(global_state.get_global_attribute(GLOBAL_SEED_GENERATOR))
    return [*{id(seed): seed for seed in generators if seed is not None}.values()]


def _spec_of_sum(value: Any) -> Any:
    """Return the type of a sum: a sparse one may have any number of slices."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(
            value.shape, value.dtype, value.indices.dtype, tf.int32, indices_shape=[None]
        )
    return tf.TensorSpec(value.shape, value.dtype)


def reject_loss(policy: Policy, loop: Any, batch: Any) -> None:
    """Reject a user's loss that compares examples."""
    losses = [loss for loss in keras.tree.flatten(loop.loss.loss) if loss is not None]
    is_users = not _library_layers.is_library(type(loop).per_example_loss.__module__)
    if is_users or not all(map(_library_layers.is_loss_of_a_library, losses)):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        compute = functools.partial(loop.per_example_loss, training=True)
        layer = Calling(lambda *arguments: compute(*arguments)[0], [loop.model])
        reject_mixing("loss", policy.finding(layer, (x, y), {}))
