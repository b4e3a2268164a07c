"""The variables of metrics, which a step counts once for all devices."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import SyncOnReadVariable


def metrics_of(model: keras.Model) -> list[Any]:
    """List the metrics of a model, with those that were passed to `compile`."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", [metric])]


def count_once(variable: Any) -> None:
    """Let a metric's variable hold one count for all devices, which the step counts once.

    TensorFlow would add up the devices' copies, and divide what is assigned to all of them.
    """
    if isinstance(variable, keras.Variable):
        variable = variable.value
    once = tf.VariableAggregation.ONLY_FIRST_REPLICA
    if not isinstance(variable, SyncOnReadVariable) or variable._aggregation is once:
        return
    if variable._aggregation is tf.VariableAggregation.SUM:
        # What it holds was divided among its copies, of which other processes have as many.
        num_replicas = variable.distribute_strategy.extended._num_replicas_in_sync
        with tf.init_scope():
            first, *others = variable.values
            share = tf.add_n([copy.read_value() for copy in variable.values])
            first.assign(share * tf.cast(num_replicas // len(variable.values), share.dtype))
            for copy in others:
                copy.assign(tf.zeros_like(share))
    variable._aggregation = once


def creator(create: Callable, **settings: Any) -> Any:
    """Create the variables of metrics that a step makes, counted once for all devices."""
    if settings.get("synchronization") == tf.VariableSynchronization.ON_READ:
        settings["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return create(**settings)
