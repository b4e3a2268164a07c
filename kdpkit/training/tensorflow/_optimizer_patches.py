"""Optimizers that work once, on the global batch's gradients, when the replicas call them.

They are changed on the instance alone, and do what they always did outside of an exact step.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks, held_variables, optimizers
from kdpkit.training.tensorflow import _checks, _global_batch, _keras_internals, _whose_code
from kdpkit.training.tensorflow._collectives import sums_for_variables
from kdpkit.training.tensorflow._step import current_step, dense_if_unique


def optimizers_of(model: keras.Model) -> list[Any]:
    """Find the optimizers in the attributes of a model and its layers, also in lists and dicts."""
    parts = held_variables.parts_of_attributes(model._flatten_layers())
    found = {id(of): of for _, of in parts if isinstance(of, keras.optimizers.Optimizer)}
    return [*found.values()]


def attach_to_optimizer(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> "_OptimizerPatch":
    """Make an optimizer reduce its gradients first, and then work once, on their sums.

    Clipping, accumulation, moving averages of weights and the check for overflow then see the
    gradient of the global batch, where Keras gives them each replica's own.
    """
    # keras-team/keras#20582, and docs/upstream/: keras_clips_each_replica.md
    optimizer._distribution_strategy = strategy  # it may have been made outside the scope
    held = [value for value in vars(optimizer).values() if isinstance(value, tf.Variable)]
    generators = [v for v in vars(optimizer).values() if isinstance(v, keras.random.SeedGenerator)]
    _checks.require_scope(f"optimizer `{optimizer.name}`", held, strategy)
    for variable in [*optimizer.variables, *(generator.state for generator in generators)]:
        _move_into_scope(optimizer, variable, strategy)
    for inner in getattr(optimizer, "optimizers", ()):  # a `MultiOptimizer`'s
        inner._distribution_strategy = strategy
    patch = _OptimizerPatch(optimizer, strategy)
    if "apply" in vars(optimizer):
        return patch
    optimizer.apply = patch.apply
    optimizer.apply_gradients = patch.apply_gradients
    optimizer.scale_loss = patch.scale_loss
    if not _whose_code.is_library(patch.kind.build.__module__):
        optimizer.build = patch.build
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        attach_to_optimizer(optimizer.inner_optimizer, strategy)
        # Keras' own checks one replica: docs/upstream/keras_checks_overflow_on_one_replica.md
        optimizer._tf_apply = optimizer._common_apply
    return patch


def _move_into_scope(
    optimizer: keras.optimizers.Optimizer, variable: Any, strategy: tf.distribute.Strategy
) -> None:
    """Give every replica a copy of an optimizer's variable that was made outside the scope."""
    if _checks.is_in_scope([variable], strategy):
        return
    is_of_others = isinstance(variable.value, tf.distribute.DistributedValues)
    if is_of_others or current_step() is not None:  # where nothing can be moved
        name = f"optimizer `{optimizer.name}`"
        _checks.reject_scope(name, strategy, variable=variable.path)
    with tf.init_scope(), strategy.scope():
        _keras_internals.move_into_scope(variable)


_updating = threading.local()


def is_updating() -> bool:
    """Return whether this thread updates variables with what the replicas have added up."""
    return getattr(_updating, "is_on", False)


class _OptimizerPatch:
    """The methods that stand in for an optimizer's own, set on the instance alone."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
    ) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        self.kind = type(optimizer)

    def build(self, variables: Any) -> None:
        """Build an optimizer of the user's, but raise if it assigns variables then.

        On one device every step would do so: docs/upstream/keras_repeats_optimizer_build.md
        """
        assigned: list[str] = []
        original = keras.Variable.assign

        def assign(variable: keras.Variable, value: Any) -> Any:
            assigned.append(variable.path)
            return original(variable, value)

        with _keras_internals.replaced(keras.Variable, "assign", assign):
            self.kind.build(self.optimizer, variables)
        if assigned:
            checks.fail(
                "The optimizer assigns variables in `build`, which Keras repeats in every step on "
                "one device, and does once on replicas.",
                optimizer=self.kind.__name__,
                assigned=sorted(set(assigned)),
                remedy="Build it before training, and both do it once: in the strategy's scope, "
                "`model.optimizer.build(model.trainable_variables)`.",
            )

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return self.reduced(self.kind.apply, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        return self.reduced(
            lambda optimizer, *both: self.kind.apply_gradients(optimizer, zip(*both, strict=True)),
            grads,
            variables,
        )

    def scale_loss(self, loss: Any) -> Any:
        step = current_step()
        scaled = self.kind.scale_loss(self.optimizer, loss)
        if step is None or step.own is not None:
            return scaled
        # From here on, since half precision overflows where one device's does only with the share.
        # Of losses that nobody reduced the gradient is that of their sum.
        return step.weigh(scaled) if loss.shape.rank == 0 else step.if_examples(scaled)

    def reduced(self, method: Callable, grads: Any, trainable_variables: Any) -> Any:
        """Call a method that applies gradients once, outside of the replicas, with their sums."""
        step = current_step()
        if tf.distribute.in_cross_replica_context():
            with _keras_internals.updates_without_merging(self.strategy):
                return method(self.optimizer, grads, trainable_variables)
        if step is None:
            return method(self.optimizer, grads, trainable_variables)
        if step.own is not None and not step.is_here():  # in a condition: all have the same
            with (
                _keras_internals.updates_without_merging(self.strategy),
                _keras_internals.assigned_in_replicas(self.optimizer.variables),
            ):
                return method(self.optimizer, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        grads = [None if grad is None else dense_if_unique(grad) for grad in grads]
        weigh = step.if_examples  # whose loss has the share: `scale_loss`
        if step.own is not None:
            weigh = functools.partial(_global_batch.share_of_gradient, step)
        weighed = [None if grad is None else weigh(grad) for grad in grads]
        return step.merge(lambda _, grads: self._apply_once(method, grads, variables), weighed)

    def _apply_once(self, method: Callable, grads: list[Any], variables: Any) -> None:
        if not self.optimizer.built:
            with tf.init_scope():  # out of the function, which may be running in a loop
                self.optimizer.build(variables)
        owners = self.optimizer._trainable_variables if variables is None else variables
        _reject_gradients_that_are_values(owners)
        grads = sum_gradients(self.strategy, grads, owners)
        _updating.is_on = True
        try:
            with _keras_internals.updates_without_merging(self.strategy):
                method(self.optimizer, grads, variables)
        finally:
            _updating.is_on = False


@contextlib.contextmanager
def compiled_updates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Have XLA compile the update of each replica's copy of each variable, while a step is traced.

    All of `apply` cannot be compiled: it goes from copy to copy, over the devices.
    """
    inner = optimizers.unscaled(optimizer)
    stock_update = inner.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        def update(gradient: Any, learning_rate: Any) -> None:
            stock_update(gradient, variable, learning_rate)

        rate = tf.convert_to_tensor(learning_rate)
        tf.function(update, jit_compile=True, autograph=False)(gradient, rate)

    with _keras_internals.replaced(inner, "update_step", update_step):
        yield


def _reject_gradients_that_are_values(variables: list[Any]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            checks.fail(
                "Float8 training passes the scales of a variable as its gradients, and Keras has "
                "no rule for the scales of several replicas. Train in bfloat16.",
                variable=variable.path,
            )


def sum_gradients(
    strategy: tf.distribute.Strategy, grads: list[Any], variables: list[Any]
) -> list[Any]:
    """Add up the replicas' gradients, outside the replicas; those that are None stay so."""
    present = [grad for grad in grads if grad is not None]
    owners = [
        variable.value if isinstance(variable, keras.Variable) else variable
        for grad, variable in zip(grads, variables, strict=True)
        if grad is not None
    ]
    sums = sums_for_variables(strategy, present, owners)
    summed = iter([_sparse_or_mirrored(strategy, total) for total in sums])
    return [None if grad is None else next(summed) for grad in grads]


def _sparse_or_mirrored(strategy: tf.distribute.Strategy, total: Any) -> Any:
    """Unwrap a sparse gradient: inside a mirrored value Keras would not know it for one.

    It would make it dense, and clip by another norm than on one device, where an embedding's
    entries count as often as they were looked up.
    """
    first = strategy.experimental_local_results(total)[0]
    return first if isinstance(first, tf.IndexedSlices) else total
