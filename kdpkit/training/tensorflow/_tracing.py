"""One trace of a step: on all examples, in the cross-replica context, as on one device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow import _gradients, _losses_and_metrics, _patches
from kdpkit.training.tensorflow._keras_internals import updated_once
from kdpkit.training.tensorflow._step import Step, graph, key, running


@contextlib.contextmanager
def traced_once(step: Step, batch: Any) -> Iterator[None]:
    """Trace a step inside of this: its layers are divided, and its operations put on devices."""
    strategy, traced_graph = step.mesh.strategy, graph()
    num_operations = 0
    if traced_graph is not None:
        num_operations = len(traced_graph.get_operations())
        step.batch_keys.update(key(x) for x in tf.nest.flatten(batch) if isinstance(x, tf.Tensor))
    with (
        strategy.scope(),
        updated_once(strategy),
        tf.variable_creator_scope(_losses_and_metrics.creator),
        _patches.installed(),
        running(step),
    ):
        yield
    if traced_graph is not None:
        _gradients.place(traced_graph, num_operations, step.mesh.devices)
