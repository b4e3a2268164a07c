"""The step that is being traced, and the part of its examples that a layer is being called on.

A step runs once, in the cross-replica context, as on one device. Only calls of layers are repeated,
once for each device, each on its part of the examples (`_layer_calls`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import processes
from kdpkit.training.tensorflow._collectives import NUMBERS, Channel
from kdpkit.training.tensorflow._keras_internals import in_xla_context
from kdpkit.training.tensorflow._split import Split


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


class Step:
    """A step that is being traced; its policy decides which layers are divided.

    Statistics (`batch_norm`) are of the "global" batch or of a "replica". With `jit` XLA compiles
    what each device computes.
    """

    def __init__(self, mesh: Mesh, policy: Any, *, batch_norm: str, jit: bool = False) -> None:
        self.mesh, self.policy = mesh, policy
        self.batch_norm, self.jit = batch_norm, jit
        self.parts: dict[Any, Any] = {}  # of tensors that were joined, by `key`
        self.batch_keys: set[Any] = set()  # of the tensors of the batch, which are on the host
        self.assertions: list[tf.Operation] = []  # that end the step before it updates anything
        # For random numbers that are drawn outside of divided layers.
        self.random_part: Part | None = None
        self.graph, self._num_channels = graph(), 0

    def channel(self) -> Channel:
        """Return a number for what processes exchange at the next border of a layer."""
        self._num_channels += 1
        return Channel(NUMBERS * self._num_channels)

    def asks_policy(self) -> bool:
        """Return whether the policy is asked about layers: where devices can divide them."""
        if tf.executing_eagerly() or self.mesh.num_parts == 1:
            return False
        return not in_xla_context(graph())

    @contextlib.contextmanager
    def drawing_by_position(self, num_examples: Any) -> Iterator[None]:
        """Draw random numbers outside of layers, too, by the position of the batch's examples."""
        self.random_part = Part(self, 0, Split(num_examples, [0], [num_examples], [num_examples]))
        try:
            yield
        finally:
            self.random_part = None


@dataclasses.dataclass
class Part:
    """The examples of one device, on which a layer is called.

    Args:
        step: The step; None while a layer is only tried.
        index: The number of the device among those of this process.
        split: Which examples each device has.
        moments: Of the global batch, for a BatchNormalization.
        drew_for_all: Whether numbers were drawn that the examples share.
    """

    step: Any
    index: int
    split: Split
    moments: Any = None
    drew_for_all: bool = False

    def __post_init__(self) -> None:
        self.num_examples = self.split.counts[self.index]
        self.start = self.split.starts[self.index]
        self.num_global_examples = self.split.total

    @property
    def device(self) -> str:
        return self.step.mesh.devices[self.index]


_running = threading.local()


def current_step() -> Step | None:
    """Return the step that this thread traces, if it traces one of an exact model."""
    return getattr(_running, "step", None)


def current_part() -> Any:
    """Return the part on which this thread calls a layer, if it is inside of such a call."""
    return getattr(_running, "part", None)


def current_random_part() -> Any:
    """Return the part for whose examples numbers are drawn; None if they are drawn for all."""
    step = current_step()
    return current_part() or (step and step.random_part)


@contextlib.contextmanager
def running(step: Any, part: Any = None) -> Iterator[None]:
    """Make a step, and perhaps a part of its examples, this thread's current ones."""
    before = current_step(), current_part()
    _running.step, _running.part = step, part
    try:
        yield
    finally:
        _running.step, _running.part = before


def key(tensor: Any) -> Any:
    """Return what identifies a tensor of a graph."""
    return id(tensor.graph), tensor.op.name, tensor.value_index


def graph() -> Any:
    """Return the graph that is being traced; None if operations run at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
