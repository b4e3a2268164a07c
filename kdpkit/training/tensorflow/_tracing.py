"""One trace of a step: on all examples, in the cross-replica context, as on one device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow import _gradients, _keras_internals, _losses_and_metrics, _patches
from kdpkit.training.tensorflow._step import Step, graph, key, running


@contextlib.contextmanager
def traced_once(step: Step, data: Any) -> Iterator[None]:
    """Trace a step in this: its layers are divided, and what it computes is put on devices."""
    strategy = step.mesh.strategy
    traced = graph()
    first = 0 if traced is None else len(traced.get_operations())
    leaves = tf.nest.flatten(data)
    step.on_host.update(key(x) for x in leaves if isinstance(x, tf.Tensor) and traced is not None)
    with (
        strategy.scope(),
        _keras_internals.updated_once(strategy),
        tf.variable_creator_scope(_losses_and_metrics.creator),
        _patches.installed(),
        running(step),
    ):
        yield
    if traced is not None:
        _gradients.place(traced, first, step.mesh.devices)
