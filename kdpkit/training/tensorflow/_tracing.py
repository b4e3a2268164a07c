"""One run of a step: on all examples, in the cross-replica context, as on one device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow import _metrics, _patches
from kdpkit.training.tensorflow._keras_internals import updated_once
from kdpkit.training.tensorflow._step import Mesh, running
from kdpkit.training.tensorflow.partition._dividing import run_divided


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def run_once(mesh: Mesh, function: Callable[[Any], Any], batch: Any, *, jit: bool) -> Any:
    """Run a step on a global batch, once for all devices; with `jit` XLA compiles what it can."""
    is_plain = tf.executing_eagerly() or (mesh.num_parts == 1 and not jit)
    is_on_one = is_plain or mesh.num_parts == 1
    with in_place_of_replicas(mesh), tf.device(mesh.home if is_on_one else None):
        if is_plain:
            return function(batch)
        return run_divided(mesh, function, batch, mesh.replicated, jit=jit)


@contextlib.contextmanager
def in_place_of_replicas(mesh: Mesh) -> Iterator[None]:
    """Run a step once inside of this, where TensorFlow would run it in each replica."""
    with (
        mesh.strategy.scope(),
        updated_once(mesh.strategy),
        tf.variable_creator_scope(_metrics.creator),
        _patches.installed(),
        running(mesh),
    ):
        yield
