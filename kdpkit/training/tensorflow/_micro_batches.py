"""Micro-batches: examples of a batch that are computed after the others, to need less memory.

Each is divided over the devices as a batch is. What compares examples is rejected: a micro-batch
has some of them alone.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow import _global_batches, _layer_trial, _library_layers
from kdpkit.training.tensorflow._keras_internals import GLOBAL_SEED_GENERATOR, global_state
from kdpkit.training.tensorflow._policy import Policy
from kdpkit.training.tensorflow._split import of_any_length

T = TypeVar("T")  # `Sums`, or several things that add up


def over_micro_batches(
    compute: Callable[[Any, Any], T], batch: Any, *, num_examples: Any, micro_batches: int
) -> T:
    """Add up what the micro-batches of a batch give, one after the other; none is empty.

    Args:
        compute: Computes a micro-batch, given where in the batch it starts.
        batch: The batch.
        num_examples: Its examples.
        micro_batches: How many to split into; their sizes differ by one example at most.
    """
    if micro_batches == 1:
        return compute(batch, 0)
    count = tf.minimum(micro_batches, tf.maximum(num_examples, 1))

    def compute_one(index: Any) -> T:
        with tf.device("CPU:0"):  # where the batch is
            start, stop = (num_examples * i // count for i in (index, index + 1))
            parts = [_global_batches.sliced(x, start, stop) for x in tf.nest.flatten(batch)]
        return compute(tf.nest.pack_sequence_as(batch, [*map(of_any_length, parts)]), start)

    first = compute_one(tf.constant(0))
    _, sums = tf.while_loop(
        lambda index, _: index < count,
        lambda index, sums: (index + 1, tf.nest.map_structure(add, sums, compute_one(index))),
        (tf.constant(1), first),
        shape_invariants=(tf.TensorSpec((), tf.int32), tf.nest.map_structure(_spec_of_sum, first)),
        parallel_iterations=1,  # else several micro-batches would be in memory
    )
    return sums


def add(one: Any, other: Any) -> Any:
    """Add up gradients; sparse ones stay so, because optimizers treat them in their own way."""
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], axis=0),
            tf.concat([one.indices, other.indices], axis=0),
            one.dense_shape,
        )
    return tf.add_n([one, other])


def seeds_of(model: keras.Model) -> list[Any]:
    """Return the generators of seeds that a model's layers draw from, and Keras' global one."""
    generators = [seed for layer in model._flatten_layers() for seed in layer._seed_generators]
    generators.append(global_state.get_global_attribute(GLOBAL_SEED_GENERATOR))
    return [*{id(of): of for of in generators if of is not None}.values()]


def _spec_of_sum(value: Any) -> Any:
    """Return the type of a sum: in a sparse one there may be any number of slices."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(
            value.shape, value.dtype, value.indices.dtype, tf.int32, indices_shape=[None]
        )
    return tf.TensorSpec(value.shape, value.dtype)


class PolicyOfMicroBatches:
    """Divides the layers that a policy divides, and rejects those that compare examples.

    Args:
        policy: The policy.
        num_parts: How many devices there are: on one no layer is divided.
    """

    def __init__(self, policy: Policy, num_parts: int) -> None:
        self._policy, self._num_parts = policy, num_parts

    def __call__(
        self, layer: keras.layers.Layer, args: Any, kwargs: Any, *, as_one: bool = False
    ) -> bool:
        """Return whether devices compute their parts of what a layer is called on."""
        if not _library_layers.is_composed(layer):  # or its layers are asked
            _reject(f"layer `{layer.name}`", self._why_examples_meet(layer, args, kwargs))
        return self._num_parts > 1 and self._policy(layer, args, kwargs, as_one=as_one)

    def _why_examples_meet(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> str | None:
        if not _library_layers.is_of_a_library(layer):
            return _mixes(self._policy.finding(layer, args, kwargs))
        is_mixing = _library_layers.has_too_few_axes(layer, args, kwargs)
        return "takes the examples of a batch for parts of one" if is_mixing else None

    def reject_loss(self, loop: Any, batch: Any) -> None:
        """Reject a loss of the user's that compares examples."""
        losses = [loss for loss in keras.tree.flatten(loop.loss.loss) if loss is not None]
        is_own = not _library_layers.is_library(type(loop).per_example_loss.__module__)
        if is_own or not all(map(_library_layers.is_loss_of_a_library, losses)):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            compute = functools.partial(loop.per_example_loss, training=True)
            layer = _layer_trial.Calling(lambda *of: compute(*of)[0], [loop.model])
            _reject("loss", _mixes(self._policy.finding(layer, (x, y), {})))


def _mixes(found: _layer_trial.Finding) -> str | None:
    """Return how examples are compared, if they surely are: what cannot be tried is taken as is."""
    return found.reason if found.verdict is _layer_trial.Verdict.MIXES else None


def _reject(name: str, reason: str | None) -> None:
    if reason is not None:
        checks.fail(
            f"The {name} {reason}, and a micro-batch has some of the examples alone.",
            remedy="Train with `accumulation=1`.",
        )
