"""What layers assign while they train, such as moving statistics: the same on all replicas."""

from typing import Any

import keras
import tensorflow as tf

from kdpkit import _checks
from kdpkit.training._step import ReplicaStep, current_step


def refuse_states_of_rows(model: Any) -> None:
    """Refuse a layer that keeps a state for each row of a batch."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            _checks.refuse(
                "A stateful layer goes on from a state for each row of the batch before, and "
                "replicas cut batches, so that rows meet other states. Use `stateful=False`, or "
                "one device.",
                layer=layer.name,
            )


def attach(model: Any) -> None:
    """Note, from now on, which variables of a model's layers a step assigns."""
    for layer in model._flatten_layers():
        if not getattr(layer, "synchronized", False):  # its statistics are equal already
            for variable in layer._non_trainable_variables:
                if keras.backend.is_float_dtype(variable.dtype):
                    _note_assignments(variable)


def _note_assignments(variable: Any) -> None:
    if "assign" in vars(variable):
        return
    assign = variable.assign

    def noting(value: Any) -> Any:
        step = current_step()
        if step is not None and all(variable is not noted for noted in step.assigned):
            step.assigned.append(variable)
        return assign(value)

    variable.assign = noting


def average(step: ReplicaStep) -> None:
    """Give all replicas the same values of what the step assigned: the mean, weighted by rows.

    Keras lets them drift apart and saves the first replica's, and a replica without rows makes
    its own NaN.
    """
    if not step.assigned:
        return
    variables = [*step.assigned]
    weighed = [step.weigh(tf.convert_to_tensor(variable)) for variable in variables]
    tf.distribute.get_replica_context().merge_call(
        lambda strategy, values: _assign_sums(strategy, values, variables), args=(weighed,)
    )


def _assign_sums(strategy: Any, values: list[Any], variables: list[Any]) -> None:
    owners = [variable.value for variable in variables]
    sums = strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, list(zip(values, owners, strict=True))
    )
    for owner, total in zip(owners, sums, strict=True):
        strategy.extended.update(owner, lambda v, new: v.assign(new), args=(total,), group=False)
