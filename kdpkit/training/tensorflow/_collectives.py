"""What replicas compute together inside a step, with gradients: sums, and all their examples."""

from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow import _distribution, _keras_internals
from kdpkit.training.tensorflow._keras_internals import with_gradient
from kdpkit.training.tensorflow._step import ReplicaStep, current_step


def gathered(x: Any) -> Any:
    """Return the examples of all replicas; `x` itself where they are these already."""
    step = current_step()
    if step is None or step.replicas == 1 or step.own is not None:
        return x
    count = tf.shape(x)[0]
    start = step.start * (count // tf.maximum(step.num_examples, 1))

    def gradient(upstream: Any) -> Any:
        step.reject_gradient_of_gradient()
        (of_all,) = step.merge(sums, [upstream])
        return of_all[start : start + count]

    return with_gradient(step.merge(concatenated, x), x, gradient)


def summed(step: ReplicaStep, value: Any, *counts: Any) -> list[Any]:
    """Return the sums of a tensor over the replicas, and of counts, which have no gradient."""
    total, *others = step.merge(sums, [value, *counts])

    def gradient(upstream: Any) -> Any:
        step.reject_gradient_of_gradient()
        return step.merge(sums, [upstream])

    return [with_gradient(total, value, gradient), *others]


def sums(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    """Add up, outside of the replicas, what each of them has."""
    return [strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in values]


def sums_for_variables(strategy: tf.distribute.Strategy, values: list[Any], owners: Any) -> Any:
    """Add up, outside of the replicas, what each of them has for each of some variables.

    Those of one type together: collectives, as NCCL's, put all that they sum into one tensor.
    """
    pairs = [*zip(values, owners, strict=True)]
    types = [strategy.experimental_local_results(value)[0].dtype for value in values]
    found: dict[int, Any] = {}
    for dtype in dict.fromkeys(types):
        indices = [index for index, of in enumerate(types) if of == dtype]
        of_type = [pairs[index] for index in indices]
        added = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, of_type)
        found |= dict(zip(indices, added, strict=True))
    return [found[index] for index in range(len(pairs))]


def concatenated(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Put the shards of all replicas together in the order of the global batch."""
    if _distribution.spans_processes(strategy):
        return _keras_internals.joined_over_processes(value, strategy)
    shards = strategy.experimental_local_results(value)
    if isinstance(shards[0], tf.SparseTensor):
        return tf.sparse.concat(0, [*shards], expand_nonconcat_dims=True)
    return tf.concat(shards, axis=0)
