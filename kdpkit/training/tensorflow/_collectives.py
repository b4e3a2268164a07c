"""What replicas compute together inside a step, with gradients: sums, and all their examples.

A loss counts with its replica's share of the examples. Where the share is put on the gradients
last (a `train_step` of the user's own), what flows back from the losses of other replicas must
count with theirs, and this replica's be taken off again.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdpkit import _checks
from kdpkit.training.tensorflow import _workers
from kdpkit.training.tensorflow._step import ReplicaStep, current_step


def gathered(x: Any) -> Any:
    """Return the examples of all replicas; `x` itself where they are these already."""
    step = current_step()
    if step is None or step.replicas == 1 or step.own is not None:
        return x
    x = tf.convert_to_tensor(x)
    if x.shape.rank == 0:
        _checks.refuse(
            "`gather_examples` puts the examples of all replicas together, and this is one number.",
            x=x,
            remedy="Gather what it was computed from.",
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def gather(x: Any) -> tuple[Any, Callable]:
        count = tf.shape(x)[0]
        start = step.start * (count // tf.maximum(step.rows, 1))

        def gradient(upstream: Any) -> Any:
            (own,) = _gradients_of_all(step, [upstream])
            return own[start : start + count]

        return step.merge(concatenated, x), gradient

    return gather(x)


def summed(step: ReplicaStep, *values: Any) -> list[Any]:
    """Return the sums of some tensors over the replicas."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def add_up(*values: Any) -> tuple[Any, Callable]:
        return step.merge(sums, [*values]), lambda *upstreams: _gradients_of_all(step, upstreams)

    return list(add_up(*values))


def _gradients_of_all(step: ReplicaStep, upstreams: Any) -> list[Any]:
    """Add up what the losses of all replicas say of values that all of them have."""
    if step.share_in_loss:
        return step.merge(sums, [*upstreams])
    totals = step.merge(sums, [step.weigh(upstream) for upstream in upstreams])
    return [total * tf.math.reciprocal_no_nan(step.share_as(total.dtype)) for total in totals]


def sums(strategy: Any, values: list[Any]) -> list[Any]:
    """Add up, outside of the replicas, what each of them has."""
    return [strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in values]


def concatenated(strategy: Any, value: Any) -> Any:
    """Put the shards of all replicas together in the order of the global batch."""
    if not _workers.spans_processes(strategy):
        return tf.concat(strategy.experimental_local_results(value), axis=0)
    from kdpkit.training.tensorflow import _keras_internals  # which needs this file

    return _keras_internals.joined_over_processes(value, strategy)
