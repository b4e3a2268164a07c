"""Metrics that work once, on the global batch, when the replicas call them.

They are changed on the instance alone, and do what they always did outside of an exact step.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _global_batch
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, running
from kdpkit.training.tensorflow._whose_code import is_metric_of_a_library


def attach_to_metric(metric: keras.metrics.Metric, *, is_global: bool) -> None:
    """Make a metric's result that of the global batch, also when a replica asks for it.

    Args:
        metric: The metric.
        is_global: Whether every step that a metric of the user's own is called in is one on the
            global batch.
    """
    for part in getattr(metric, "metrics", [metric]):
        if not hasattr(part.update_state, "kdpkit_counts"):
            part.update_state = _on_global_batch(part, _weighing(part), is_global)
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
        if step is None or step.own is None:
            return update(*args, **kwargs)
        if is_of_library:
            parts = _global_batch.parts_of_known(step, (args, kwargs))
            if parts is not None:
                part, (args, kwargs) = parts
                with running(part):
                    return update(*args, **kwargs)
        elif is_global:
            return update(*args, **kwargs)
        if not _global_batch.is_first():
            return None
        with running(None):  # it adds up over the replicas, where others may have parts
            return update(*args, **kwargs)

    update_state.kdpkit_counts = True  # type: ignore[attr-defined]  # marks what is wrapped
    return update_state


def _read(value: Any) -> Any:
    """Read a variable that a metric gives as its result: its sum over the replicas."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def _weighing(metric: keras.metrics.Metric) -> Callable:
    """Return an update that takes of numbers for a global batch this replica's shares.

    Such are what a `train_step` logs, a layer tells, or a metric function gives that reduces.
    """
    if type(metric) in (keras.metrics.Mean, keras.metrics.Sum):
        return _weighing_of_mean(metric.update_state)
    is_of_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
    return _weighing_of_function(metric) if is_of_function else metric.update_state


def _step_of_part() -> ReplicaStep | None:
    step = current_step()
    return None if step is None or step.own is not None else step


def _weighing_of_mean(update: Callable) -> Callable:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        step = _step_of_part()
        if step is not None and sample_weight is None:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0:
                values, sample_weight = step.if_examples(values), step.share_as(tf.float32)
        elif step is not None and tf.convert_to_tensor(sample_weight).shape.rank == 0:
            values = step.if_examples(tf.reduce_mean(values))  # as Keras reduces them, but for NaN
        return update(values, sample_weight=sample_weight)

    return update_state


def _weighing_of_function(metric: keras.metrics.Metric) -> Callable:
    """Weigh what a metric function gives, if that is one number for all examples."""
    stock_update = metric.update_state

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = _step_of_part()
        if step is None:
            return stock_update(y_true, y_pred, sample_weight)
        value = tf.convert_to_tensor(metric._fn(y_true, y_pred, **metric._fn_kwargs))
        if value.shape.rank != 0:
            return stock_update(y_true, y_pred, sample_weight)
        weight = 1.0 if sample_weight is None else tf.reduce_mean(sample_weight)
        return keras.metrics.Mean.update_state(
            metric, step.if_examples(value), sample_weight=step.weigh(tf.cast(weight, tf.float32))
        )

    return update_state
