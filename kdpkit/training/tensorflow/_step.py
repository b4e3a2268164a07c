"""The step that is traced now, and the device whose part of the examples a layer computes now.

A step runs once, in the cross-replica context, and does what it does on one device. Only calls of
layers are repeated, once on each device, each on its part of the examples (`_layer_calls`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit._internal import processes
from kdpkit.training.tensorflow._collectives import NUMBERS, Channel
from kdpkit.training.tensorflow._keras_internals import in_xla_context
from kdpkit.training.tensorflow._split import Split


class Mesh:
    """The devices that share the examples of a batch.

    Args:
        strategy: The strategy whose replicas they are.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        try:
            self.devices = tuple(strategy.extended.worker_devices)  # of this process
        except RuntimeError:  # that there is without a strategy
            self.devices = ("",)
        self.num_parts = strategy.num_replicas_in_sync
        self.num_processes = self.num_parts // len(self.devices)
        first = processes.index() * len(self.devices) if self.num_processes > 1 else 0
        self.local = range(first, first + len(self.devices))  # the parts of this process

    @property
    def home(self) -> str:
        """The device that has what is not divided."""
        return self.devices[0]


class MicroBatch(NamedTuple):
    """Some examples of a batch, of which a step computes so many at a time.

    Args:
        start: Where in the batch they begin.
        num_examples: How many they are.
        of_batch: How many are in the batch.
    """

    start: Any
    num_examples: Any
    of_batch: Any

    def position(self, total: Any) -> tuple[Any, Any]:
        """Return where so many entries of these begin in the batch's, and how many it has."""
        each = total // tf.maximum(self.num_examples, 1)
        fits = each * self.num_examples == total
        return tf.where(fits, each * self.start, 0), tf.where(fits, each * self.of_batch, total)


class Step:
    """A step that is being traced.

    Args:
        mesh: The devices.
        policy: Decides whether the call of a layer is divided.
        batch_norm: Whether statistics are of the "global" batch or of a "replica".
        jit: Whether XLA compiles what each device computes.
    """

    def __init__(self, mesh: Mesh, policy: Any, *, batch_norm: str, jit: bool = False) -> None:
        self.mesh, self.policy = mesh, policy
        self.batch_norm, self.jit = batch_norm, jit
        self.parts: dict[Any, Any] = {}  # of tensors that were put together, by `key`
        self.on_host: set[Any] = set()  # tensors of the batch
        self.checks: list[tf.Operation] = []  # that end the step before it updates anything
        self.micro_batch: MicroBatch | None = None
        self.random_part: Part | None = (
            None  # whose examples numbers are drawn for outside of layers
        )
        self._graph, self._num_channels = graph(), 0

    def channel(self) -> Channel:
        """Return a number for what processes exchange at the next border of a layer."""
        self._num_channels += 1
        return Channel(NUMBERS * self._num_channels)

    def is_here(self) -> bool:
        """Return whether the step is traced here, and not in a condition or a loop inside of it."""
        return self._graph is graph()

    def asks_policy(self) -> bool:
        """Return whether the policy decides about layers.

        On one device it only rejects layers that compare the examples of micro-batches.
        """
        if tf.executing_eagerly():
            return False
        if self.mesh.num_parts == 1:
            return self.micro_batch is not None
        return not in_xla_context(graph())

    @contextlib.contextmanager
    def at(self, start: Any, num_examples: Any, of_batch: Any) -> Iterator[None]:
        """Draw random numbers for the step's examples by their position in a batch."""
        if of_batch is not num_examples:
            self.micro_batch = MicroBatch(start, num_examples, of_batch)
        self.random_part = Part(self, 0, Split(num_examples, [0], [num_examples], [num_examples]))
        try:
            yield
        finally:
            self.micro_batch = self.random_part = None


@dataclasses.dataclass
class Part:
    """One device's part of the examples that a layer is called on.

    Args:
        step: The step.
        index: The number of the device among those of this process.
        split: Which examples each device has.
    """

    step: Any
    index: int
    split: Split
    moments: Any = None  # of the global batch, for a BatchNormalization
    drew_for_all: bool = False  # numbers that the examples share

    def __post_init__(self) -> None:
        split, micro_batch = self.split, self.step and self.step.micro_batch
        self.num_examples, self.num_global_examples = split.counts[self.index], split.total
        self.start = split.starts[self.index]
        if micro_batch:
            offset, self.num_global_examples = micro_batch.position(split.total)
            self.start += offset

    @property
    def device(self) -> str:
        return self.step.mesh.devices[self.index]

    @property
    def is_all(self) -> bool:
        return self.num_examples is self.num_global_examples


_running = threading.local()


def current_step() -> Step | None:
    """Return the step that this thread traces, if it traces one of an exact model."""
    return getattr(_running, "step", None)


def current_part() -> Any:
    """Return the part whose layer this thread calls, if it is inside of such a call."""
    return getattr(_running, "part", None)


def current_random_part() -> Any:
    """Return the part for whose examples numbers are drawn now; None if a step draws for all."""
    step = current_step()
    return current_part() or (step and step.random_part)


@contextlib.contextmanager
def running(step: Any, part: Any = None) -> Iterator[Any]:
    """Make a step, and perhaps a part of its examples, this thread's current ones."""
    before = current_step(), current_part()
    _running.step, _running.part = step, part
    try:
        yield step if part is None else part
    finally:
        _running.step, _running.part = before


def key(tensor: Any) -> Any:
    """Return what stands for a tensor of a graph."""
    return id(tensor.graph), tensor.op.name, tensor.value_index


def graph() -> Any:
    """Return the graph that is being traced; None if operations run at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
