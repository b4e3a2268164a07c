"""One trace of a step: on all examples, in the cross-replica context, as on one device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow import _gradients, _losses_and_metrics, _patches
from kdpkit.training.tensorflow._global_batches import examples_in_batch
from kdpkit.training.tensorflow._keras_internals import updated_once
from kdpkit.training.tensorflow._step import Mesh, Step, graph, key, running


def run_once(
    mesh: Mesh, policy: Any, function: Callable, batch: Any, batch_norm: str, jit: bool
) -> Any:
    """Run a step on a global batch, once for all devices; with `jit` XLA compiles what it can."""
    is_one = mesh.num_parts == 1
    step = Step(mesh, policy, batch_norm=batch_norm, jit=jit and not is_one)
    with traced_once(step, batch), contextlib.ExitStack() as stack:
        if jit and is_one:  # XLA draws several axes in another order.
            count = examples_in_batch(batch)
            stack.enter_context(step.drawing_by_position(count))
        return function()


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
