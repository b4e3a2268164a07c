"""The devices of a step, and those of the step that a thread runs.

A step runs once, in the cross-replica context, as on one device.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import processes


class Mesh:
    """The devices that share the examples of a batch: the replicas of a strategy."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        try:
            self.devices = tuple(strategy.extended.worker_devices)  # of this process
        except RuntimeError:  # TensorFlow's default strategy, which is that of one device
            self.devices = ("",)
        self.num_parts = strategy.num_replicas_in_sync
        if self.num_parts > 1:
            strategies._is_one_used.set()
        self.num_processes = self.num_parts // len(self.devices)
        first = processes.index() * len(self.devices) if self.num_processes > 1 else 0
        self.local = range(first, first + len(self.devices))  # the parts of this process
        self.home = self.devices[0]  # the device of everything that is not divided
        # The variables that steps have read, by the first copy's handle. A `tf.function` inside of
        # a step is traced once, and reads its variables in later traces of the step, too.
        self.replicated: dict[int, Any] = {}


_running = threading.local()


def current_mesh() -> Mesh | None:
    """Return the devices of the step that this thread runs, if it runs one of an exact model."""
    return getattr(_running, "mesh", None)


@contextlib.contextmanager
def running(mesh: Mesh) -> Iterator[None]:
    """Let this thread run a step of these devices."""
    before = current_mesh()
    _running.mesh = mesh
    try:
        yield
    finally:
        _running.mesh = before
