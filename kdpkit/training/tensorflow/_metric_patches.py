"""Metrics that work once, on the global batch, when the replicas call them.

They are changed on the instance alone, and do what they always did outside of an exact step.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow import _global_batch
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, running
from kdpkit.training.tensorflow._whose_code import compares_predictions, is_metric_of_a_library


def attach_to_metric(metric: keras.metrics.Metric, *, is_global: bool) -> None:
    """Make a metric's result that of the global batch, also when a replica asks for it.

    Args:
        metric: The metric.
        is_global: Whether every step that a metric of the user's own is called in is one on the
            global batch.
    """
    for part in getattr(metric, "metrics", [metric]):
        if not hasattr(part.update_state, "kdpkit_counts"):
            part.update_state = _on_global_batch(part, part.update_state, is_global)
            if is_metric_of_a_library(part):
                part.reset_state = _on_each_replica(part.reset_state)
                _mark_as_counted(part)
            elif is_global:  # before a callback assigns what it goes on from
                for variable in part.variables:
                    read_the_first(variable.value)
    if not is_global or "result" in vars(metric):
        return
    stock_result = metric.result

    def result() -> Any:
        step = current_step()
        if step is None or tf.distribute.in_cross_replica_context():
            return tf.nest.map_structure(_read, stock_result())
        return step.merge(lambda _: tf.nest.map_structure(_read, stock_result()))

    metric.result = result


def _on_global_batch(metric: keras.metrics.Metric, update: Callable, is_global: bool) -> Callable:
    """Have a metric count the global batch once, where each replica has all of it.

    A library's metric adds up over the replicas: each counts its part of what divided layers gave,
    and the first one alone what the step has computed on the global batch. The user's own may keep
    anything, so all replicas count alike, and the first one's variables are read (`_patches`).
    """
    is_of_library = is_metric_of_a_library(metric)

    @functools.wraps(update)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return update(*args, **kwargs)
        if step.own is None:
            return _count_part(step, metric, update, *args, **kwargs)
        if is_of_library:
            parts = None
            if not compares_predictions(metric, args[1:]):
                parts = _global_batch.parts_of_known(step, (args, kwargs))
            if parts is not None:
                part, (args, kwargs) = parts
                with running(part):
                    _count_part(part, metric, update, *args, **kwargs)
                return _mark_as_counted(metric)
        elif is_global:
            return update(*args, **kwargs)
        if not _global_batch.is_first():
            return None
        with running(None):  # it adds up over the replicas, where others may have parts
            update(*args, **kwargs)
        return _mark_as_counted(metric)

    update_state.kdpkit_counts = True  # type: ignore[attr-defined]  # marks what is wrapped
    return update_state


def _on_each_replica(reset: Callable) -> Callable:
    """Have every replica reset what it has counted, which is added up over them."""

    @functools.wraps(reset)
    def reset_state() -> None:
        with running(None):
            reset()

    return reset_state


def _mark_as_counted(metric: keras.metrics.Metric) -> None:
    """Have a step read and assign a metric's sums over the replicas, as numbers (`_patches`)."""
    for variable in metric.variables:
        variable.value.kdpkit_is_counted = True


def read_the_first(variable: Any) -> None:
    """Have the first replica's value read of a variable that each of them has in full."""
    if isinstance(variable, tf.distribute.DistributedValues):
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def _read(value: Any) -> Any:
    """Read a variable that a metric gives as its result: its sum over the replicas."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def _count_part(
    step: ReplicaStep, metric: keras.metrics.Metric, update: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Count a replica's examples; of numbers for a global batch, as losses, its share of them.

    Metric functions give such where predictions have the examples as their only axis.
    """
    given = inspect.signature(update).bind(*args, **kwargs)
    given.apply_defaults()
    if type(metric) in (keras.metrics.Mean, keras.metrics.Sum):
        values, weight = map(_as_tensor, given.args)
        if weight is None and values.shape.rank == 0:
            return update(step.if_examples(values), step.share_as(tf.float32))
        if _is_number(weight) and not step.is_divided:  # a loss: as Keras reduces it, but for NaN
            return update(step.if_examples(tf.reduce_mean(values)), weight)
        if _is_number(weight) and type(metric) is keras.metrics.Mean:
            return update(step.if_examples(tf.reduce_mean(values)), step.weigh(weight))
    elif isinstance(metric, keras.metrics.MeanMetricWrapper):
        *inputs, weight = given.args
        if step.replicas > 1 and compares_predictions(metric, inputs[1:]):
            checks.fail(
                "The metric takes the predictions of a batch for one example's, and each replica "
                "has only some of them.",
                metric=metric.name,
                remedy="Give them another axis: `keras.layers.Reshape((1,))`.",
            )
        value = tf.convert_to_tensor(metric._fn(*inputs, **metric._fn_kwargs))
        if value.shape.rank == 0 or _is_number(weight):
            weight = tf.cast(1.0 if weight is None else tf.reduce_mean(weight), tf.float32)
            value, weight = step.if_examples(tf.reduce_mean(value)), step.weigh(weight)
            return keras.metrics.Mean.update_state(metric, value, sample_weight=weight)
    with running(None):  # a loss in it, as in `Perplexity`, gives what is added up
        return update(*args, **kwargs)


def _is_number(weight: Any) -> bool:
    """Return whether a weight is one number for all examples."""
    return weight is not None and tf.convert_to_tensor(weight).shape.rank == 0


def _as_tensor(value: Any) -> Any:
    return value if value is None else tf.convert_to_tensor(value)
