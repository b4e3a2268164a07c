"""Optimizers in the cross-replica context of a step: they work once, on its gradients."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow import _checks, _keras_internals
from kdpkit.training.tensorflow._step import current_mesh

_LIBRARIES = ("keras", "keras_hub", "tensorflow", "kdpkit")


def move_into_scope(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Let every device have copies of an optimizer's variables, wherever it was made."""
    optimizer._distribution_strategy = strategy
    if type(optimizer).build.__module__.partition(".")[0] not in _LIBRARIES:
        optimizer.build = functools.partial(_build, optimizer)
    name, attributes = f"optimizer `{optimizer.name}`", vars(optimizer).values()
    tf_variables = [value for value in attributes if isinstance(value, tf.Variable)]
    _checks.require_scope(name, tf_variables, strategy)
    seeds = [v.state for v in attributes if isinstance(v, keras.random.SeedGenerator)]
    for variable in [*optimizer.variables, *seeds]:
        if _checks.is_in_scope([variable], strategy):
            continue
        is_of_other_strategy = isinstance(variable.value, tf.distribute.DistributedValues)
        if is_of_other_strategy or current_mesh() is not None:  # A step cannot move variables.
            _checks.reject_scope(name, strategy, variable=variable.path)
        with tf.init_scope(), strategy.scope():
            _keras_internals.move_into_scope(variable)
    for inner in getattr(optimizer, "optimizers", ()):  # of a `MultiOptimizer`
        inner._distribution_strategy = strategy
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        move_into_scope(optimizer.inner_optimizer, strategy)


def copy_state(updated: Iterable[keras.optimizers.Optimizer]) -> None:
    """Copy to all devices the state that steps have updated on the first one only."""
    for optimizer in updated:
        for variable in optimizer.variables:
            first, *others = getattr(variable.value, "values", (variable.value,))
            for copy in others:
                copy.assign(first.read_value())


def _copy_state_before_run(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Let other steps, which a strategy runs in its replicas, go on from an optimizer's state."""
    if "kdpkit_updated" not in vars(strategy):
        strategy.kdpkit_updated, original = weakref.WeakSet(), strategy.run

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            copy_state(strategy.kdpkit_updated)
            return original(*args, **kwargs)

        strategy.run = run
    strategy.kdpkit_updated.add(optimizer)


def apply(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Let an optimizer that is no attribute of the model work on the model's strategy, too."""
    mesh = current_mesh()
    if mesh is not None:
        if optimizer._distribution_strategy is not mesh.strategy:
            move_into_scope(optimizer, mesh.strategy)
        _copy_state_before_run(optimizer, mesh.strategy)
        variables = trainable_variables or getattr(optimizer, "_trainable_variables", ())
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                checks.fail(
                    "Float8 training passes the scales of a variable as its gradients, and Keras "
                    "has no rule for the scales of several replicas. Train in bfloat16.",
                    variable=variable.path,
                )
        if not optimizer.built:
            with tf.init_scope(), mesh.strategy.scope():
                optimizer.build([*variables])
    return original(optimizer, grads, trainable_variables)


def _build(optimizer: Any, variables: Any) -> None:
    """Build a user's optimizer, but raise if it assigns variables then.

    On one device every step would do so: docs/upstream/keras_repeats_optimizer_build.py
    """
    assigned: list[str] = []
    original = keras.Variable.assign

    def assign(variable: keras.Variable, value: Any) -> Any:
        assigned.append(variable.path)
        return original(variable, value)

    with _keras_internals.replaced(keras.Variable, "assign", assign):
        type(optimizer).build(optimizer, variables)
    if assigned:
        checks.fail(
            "The optimizer assigns variables in `build`, which Keras repeats in every step on "
            "one device, and does once on replicas.",
            optimizer=type(optimizer).__name__,
            assigned=sorted(set(assigned)),
            remedy="Build it before training, and both do it once: in the strategy's scope, "
            "`model.optimizer.build(model.trainable_variables)`.",
        )


def apply_scaled(
    original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Check the gradients once: docs/upstream/keras_checks_overflow_on_one_replica.py."""
    if current_mesh() is None:
        return original(optimizer, grads, trainable_variables)
    return optimizer._common_apply(grads, trainable_variables)
