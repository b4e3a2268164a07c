"""Losses and metrics of libraries, computed on the devices that have the predictions' parts."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow import _library_layers
from kdpkit.training.tensorflow._keras_internals import SyncOnReadVariable
from kdpkit.training.tensorflow._layer_calls import Arguments
from kdpkit.training.tensorflow._step import Part, Step, current_part, current_step, running
from kdpkit.training.tensorflow._tensor_parts import join_output, known_parts


def call_loss(original: Callable, loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Compute the losses of examples, each device those of its part."""
    step = current_step()
    if step is None or current_part() is not None or not _library_layers.is_loss_of_a_library(loss):
        return original(loss, y_true, y_pred)
    return _on_parts(step, lambda *of: original(loss, *of), y_true, y_pred)


def update_metric(
    original: Callable, metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Update a mean over examples, of which each device computes its part."""
    step = current_step()
    if (
        step is None
        or current_part() is not None
        or not _library_layers.is_metric_of_a_library(metric)
    ):
        return original(metric, y_true, y_pred, sample_weight)
    function = metric._fn

    def values_of_parts(y_true: Any, y_pred: Any, **kwargs: Any) -> Any:
        compute = lambda *of: function(*of, **kwargs)  # noqa: E731
        return _on_parts(step, compute, y_true, y_pred)

    metric._fn = values_of_parts
    try:
        return original(metric, y_true, y_pred, sample_weight)
    finally:
        metric._fn = function


def _on_parts(step: Step, compute: Callable, y_true: Any, y_pred: Any) -> Any:
    leaves = tf.nest.flatten((y_true, y_pred))
    predictions = [x for x in tf.nest.flatten(y_pred) if isinstance(x, tf.Tensor)]
    known = [x for x in predictions if x.shape.rank and known_parts(step, x)]
    is_dense = all(isinstance(leaf, tf.Tensor) for leaf in leaves)
    if not known or not is_dense or any((x.shape.rank or 0) < 2 for x in predictions):
        return compute(y_true, y_pred)
    parts = Arguments(step, known[0], ((y_true, y_pred), {}))
    values = []
    for index, ((of_true, of_pred), _) in enumerate(parts.nests):
        part = Part(step, index, parts.split)
        with running(step, part), tf.device(part.device):
            values.append(compute(of_true, of_pred))
    if values[0].shape.rank == 0:  # of all examples together
        return compute(y_true, y_pred)
    length = known[0].shape[0]
    return join_output(step, parts.split, values, length=length, each=parts.each)


def count_once(variable: Any) -> None:
    """Have a metric's variable hold one count for all devices, which the step counts once.

    TensorFlow would add up the copies that the devices have, and divide what is assigned to all.
    """
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if isinstance(variable, SyncOnReadVariable):
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def creator(create: Callable, **settings: Any) -> Any:
    """Create the variables of metrics that a step makes, counted once for all devices."""
    if settings.get("synchronization") == tf.VariableSynchronization.ON_READ:
        settings["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return create(**settings)
