"""Metrics that work once, on the global batch, when the replicas call them.

They are changed on the instance alone, and do what they always did outside of an exact step.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _global_batch
from kdpkit.training.tensorflow._step import ReplicaStep, current_step


def attach_to_metric(metric: keras.metrics.Metric) -> None:
    """Make a metric's result that of the global batch, also when a replica asks for it."""
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
    """Have the first replica alone count the global batch, where each replica has that."""

    @functools.wraps(update)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        is_counted = step is not None and step.own is not None and not _global_batch.is_first()
        if step is not None:
            step.note_roots((args, kwargs))
        return None if is_counted else update(*args, **kwargs)

    return update_state


def _read(value: Any) -> Any:
    """Read a variable that a metric gives as its result: its sum over the replicas."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def weigh_single_numbers(metric: keras.metrics.Metric) -> None:
    """Make a mean of numbers that stand for a global batch one of the replicas' shares of them.

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
                values, sample_weight = step.if_examples(values), step.share
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
        step.note_roots(value)
        if value.shape.rank != 0:
            return stock_update(y_true, y_pred, sample_weight)
        weight = 1.0 if sample_weight is None else tf.reduce_mean(sample_weight)
        return keras.metrics.Mean.update_state(
            metric, step.if_examples(value), sample_weight=step.weigh(tf.cast(weight, tf.float32))
        )

    return update_state
