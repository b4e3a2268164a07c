"""Optimizers and metrics that work once, on the whole batch, when the replicas call them.

Both are changed on the instance alone, and do what they always did outside of an exact step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdpkit import _checks, _optimizers
from kdpkit.training.tensorflow import _keras_internals, _whole_batch
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, dense_if_unique
from kdpkit.training.tensorflow._verification_report import Kind


def optimizers_of(model: Any) -> list[Any]:
    """Find the optimizers in the attributes of a model and its layers, also in lists and dicts."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, dict | list | tuple) else [value]
            found |= {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    return [*found.values()]


class _FoundError(Exception):
    """A step called an optimizer that no attribute of the model holds."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.name)
        self.optimizer = optimizer


def finding_optimizers(strategy: Any, function: Callable[[], None]) -> None:
    """Call what runs a step, again for each optimizer that the step finds elsewhere than in it."""
    while True:
        try:
            with _finding():
                return function()
        except _FoundError as found:
            attach_to_optimizer(found.optimizer, strategy)


@contextlib.contextmanager
def _finding() -> Iterator[None]:
    def finding(original: Callable) -> Callable:
        @functools.wraps(original)
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if current_step() is not None and "apply" not in vars(optimizer):
                raise _FoundError(optimizer)
            return original(optimizer, *args, **kwargs)

        return apply

    with contextlib.ExitStack() as stack:
        for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(_keras_internals.replaced(kind, "apply", finding(kind.apply)))
        yield


def scales_loss(optimizer: Any) -> bool:
    """Tell whether an optimizer expects gradients of a loss that its `scale_loss` scaled."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or bool(
        getattr(optimizer, "loss_scale_factor", None)
    )


def attach_to_optimizer(optimizer: Any, strategy: Any) -> None:
    """Make an optimizer reduce its gradients first, and then work once, on the whole ones.

    Clipping, accumulation, moving averages of weights and the check for overflow then see the
    gradient of the global batch, where Keras gives them each replica's own.
    """
    optimizer._distribution_strategy = strategy  # it may have been made outside the scope
    if "apply" in vars(optimizer):
        return
    kind = type(optimizer)

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        return reduced(kind.apply, grads, trainable_variables)

    def apply_gradients(grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        return reduced(
            lambda optimizer, *both: kind.apply_gradients(optimizer, zip(*both, strict=True)),
            grads,
            variables,
        )

    def reduced(method: Callable, grads: Any, trainable_variables: Any) -> Any:
        """Call a method that applies gradients once, outside of the replicas, with their sums."""
        step = current_step()
        if tf.distribute.in_cross_replica_context():
            with _keras_internals.updates_without_merging(strategy):
                return method(optimizer, grads, trainable_variables)
        if step is None:
            return method(optimizer, grads, trainable_variables)
        weigh = step.if_rows if carries_share(step) else step.weigh
        if step.own is not None:
            weigh = functools.partial(_whole_batch.share_of_gradient, step)
        if step.trial is not None:
            step.trial.applied += [grad for grad in grads if grad is not None]
        grads = [None if grad is None else dense_if_unique(grad) for grad in grads]
        variables = None if trainable_variables is None else list(trainable_variables)
        if step.trial is not None and step.trial.detailed:
            plain = [None if grad is None else step.if_rows(grad) for grad in grads]
            step.merge(
                lambda strategy, grads: note_without_shares(strategy, step.trial, grads, variables),
                plain,
            )
        grads = [None if grad is None else weigh(grad) for grad in grads]
        return step.merge(
            lambda strategy, grads: apply_whole(strategy, step.trial, method, grads, variables),
            grads,
        )

    def apply_whole(
        strategy: Any, trial: Any, method: Callable, grads: list[Any], variables: Any
    ) -> None:
        if not optimizer.built:
            with tf.init_scope():  # out of the function, which may be running in a loop
                optimizer.build(variables)
        owners = optimizer._trainable_variables if variables is None else variables
        _refuse_gradients_that_are_values(owners)
        grads = sum_gradients(strategy, grads, owners)
        if trial is None:
            with _keras_internals.updates_without_merging(strategy):
                method(optimizer, grads, variables)
        else:
            trial.note_gradients(optimizer, owners, grads)

    def note_without_shares(strategy: Any, trial: Any, grads: list[Any], variables: Any) -> int:
        owners = optimizer._trainable_variables if variables is None else variables
        sums = sum_gradients(strategy, grads, owners)
        trial.note_gradients(optimizer, owners, sums, Kind.SUMMED_GRADIENT)
        return 0

    def scale_loss(loss: Any) -> Any:
        step = current_step()
        scaled = kind.scale_loss(optimizer, loss)
        if step is None or not carries_share(step):
            return scaled
        # Losses that nobody reduced: the gradient is that of their sum.
        return step.weigh(scaled) if loss.shape.rank == 0 else step.if_rows(scaled)

    def carries_share(step: ReplicaStep) -> bool:
        # Half precision overflows where one device's does only if the share is there already.
        return step.own is None and (step.share_in_loss or scales_loss(optimizer))

    optimizer.apply = apply
    optimizer.apply_gradients = apply_gradients
    optimizer.scale_loss = scale_loss
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        attach_to_optimizer(optimizer.inner_optimizer, strategy)
        optimizer._tf_apply = optimizer._common_apply  # Keras': refuses to be outside replicas


@contextlib.contextmanager
def compiled_updates(optimizer: Any) -> Iterator[None]:
    """Have XLA compile the update of each replica's copy of each variable, while a step is traced.

    The whole of `apply` cannot be compiled: it goes from copy to copy, over the devices.
    """
    inner = _optimizers.unscaled(optimizer)
    stock_update = inner.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        def update(gradient: Any, learning_rate: Any) -> None:
            stock_update(gradient, variable, learning_rate)

        rate = tf.convert_to_tensor(learning_rate)
        tf.function(update, jit_compile=True, autograph=False)(gradient, rate)

    inner.update_step = update_step
    try:
        yield
    finally:
        del inner.update_step


def _refuse_gradients_that_are_values(variables: list[Any]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            _checks.refuse(
                "Float8 training passes the scales of a variable as its gradients, and Keras has "
                "no rule for the scales of several replicas. Train in bfloat16.",
                variable=variable.path,
            )


def sum_gradients(strategy: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Add up the replicas' gradients, outside the replicas; those that are None stay so."""
    present = [(g, v.value) for g, v in zip(grads, variables, strict=True) if g is not None]
    if not present:
        return grads
    sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, present)
    whole = iter([_sparse_or_mirrored(strategy, total) for total in sums])
    return [None if grad is None else next(whole) for grad in grads]


def _sparse_or_mirrored(strategy: Any, total: Any) -> Any:
    """Unwrap a sparse gradient: inside a mirrored value Keras would not know it for one.

    It would make it dense, and clip by another norm than on one device, where an embedding's rows
    count as often as they were looked up.
    """
    first = strategy.experimental_local_results(total)[0]
    return first if isinstance(first, tf.IndexedSlices) else total


def attach_to_metric(metric: Any) -> None:
    """Make a metric's result that of the whole batch, also when a replica asks for it."""
    if "result" in vars(metric):
        return
    stock_result = metric.result

    def result() -> Any:
        step = current_step()
        if step is None or tf.distribute.in_cross_replica_context():
            return tf.nest.map_structure(_read, stock_result())
        return step.merge(lambda _: tf.nest.map_structure(_read, stock_result()))

    metric.result = result
    weigh_single_numbers(metric)
    metric.update_state = _counting_once(metric.update_state)


def _counting_once(update: Callable) -> Callable:
    """Have the first replica alone count the whole batch, where each replica has that."""

    @functools.wraps(update)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        is_counted = step is not None and step.own is not None and not _whole_batch.is_first()
        if step is not None:
            step.note_roots((args, kwargs))
        return None if is_counted else update(*args, **kwargs)

    return update_state


def _read(value: Any) -> Any:
    """Read a variable that a metric gives as its result: its sum over the replicas."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def weigh_single_numbers(metric: Any) -> None:
    """Make a mean of numbers that stand for a whole batch one of the replicas' shares of them.

    That is what a `train_step` logs, a layer tells, or a metric function gives that reduces.
    """
    for part in getattr(metric, "metrics", [metric]):
        if "update_state" in vars(part):
            continue
        if type(part) in (keras.metrics.Mean, keras.metrics.Sum):
            part.update_state = _weighing(part.update_state)
        elif isinstance(part, keras.metrics.MeanMetricWrapper):
            part.update_state = _weighing_of_function(part)


def _step_of_part() -> ReplicaStep | None:
    step = current_step()
    return None if step is None or step.own is not None else step


def _weighing(update: Callable) -> Callable:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        step = _step_of_part()
        if step is not None and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0:
                values, sample_weight = step.if_rows(values), step.share
        elif step is not None and tf.convert_to_tensor(sample_weight).shape.rank == 0:
            values = step.if_rows(tf.reduce_mean(values))  # as Keras reduces them, but for NaN
        return update(values, sample_weight=sample_weight)

    return update_state


def _weighing_of_function(metric: Any) -> Callable:
    """Weigh what a metric function gives, if that is one number for all rows."""
    stock_update = metric.update_state

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = _step_of_part()
        if step is None:
            return stock_update(y_true, y_pred, sample_weight)
        value = tf.convert_to_tensor(metric._fn(y_true, y_pred, **metric._fn_kwargs))
        step.note_roots(value)
        if value.shape.rank != 0:
            return stock_update(y_true, y_pred, sample_weight)
        weight = 1.0 if sample_weight is None else tf.reduce_mean(sample_weight)
        return keras.metrics.Mean.update_state(
            metric, step.if_rows(value), sample_weight=step.weigh(tf.cast(weight, tf.float32))
        )

    return update_state
