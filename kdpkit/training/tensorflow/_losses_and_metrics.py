"""Losses and metrics of libraries, computed on the devices that have the predictions' parts."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _library_layers
from kdpkit.training.tensorflow._keras_internals import SyncOnReadVariable, replaced
from kdpkit.training.tensorflow._layer_calls import Arguments
from kdpkit.training.tensorflow._step import Part, Step, current_part, current_step, running
from kdpkit.training.tensorflow._tensor_parts import join_output, known_parts


def call_loss(original: Callable, loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Compute the losses of examples, each device those of its part."""
    step = current_step()
    if step is None or current_part() or not _library_layers.is_loss_of_a_library(loss):
        return original(loss, y_true, y_pred)
    return _on_parts(step, lambda *arrays: original(loss, *arrays), y_true, y_pred)


def update_metric(
    original: Callable, metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Update a mean over examples, of which each device computes its part."""
    step = current_step()
    if step is None or current_part() or not _library_layers.is_metric_of_a_library(metric):
        return original(metric, y_true, y_pred, sample_weight)
    function = metric._fn

    def function_on_parts(y_true: Any, y_pred: Any, **kwargs: Any) -> Any:
        return _on_parts(step, lambda *arrays: function(*arrays, **kwargs), y_true, y_pred)

    with replaced(metric, "_fn", function_on_parts):
        return original(metric, y_true, y_pred, sample_weight)


def _on_parts(step: Step, compute: Callable, y_true: Any, y_pred: Any) -> Any:
    leaves = tf.nest.flatten((y_true, y_pred))
    predictions = [x for x in tf.nest.flatten(y_pred) if isinstance(x, tf.Tensor)]
    divided = [x for x in predictions if x.shape.rank and known_parts(step, x)]
    is_dense = all(isinstance(leaf, tf.Tensor) for leaf in leaves)
    if not divided or not is_dense or any((x.shape.rank or 0) < 2 for x in predictions):
        return compute(y_true, y_pred)
    arguments = Arguments(step, divided[0], (y_true, y_pred))
    values = []
    for index, arrays in enumerate(arguments.by_device):
        part = Part(step, index, arguments.split)
        with running(step, part), tf.device(part.device):
            values.append(compute(*arrays))
    if values[0].shape.rank == 0:  # It is one number for all examples together.
        return compute(y_true, y_pred)
    lengths = {"length": divided[0].shape[0], "per_example": arguments.entries_per_example}
    return join_output(step, arguments.split, values, **lengths)


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
