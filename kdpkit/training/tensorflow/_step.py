"""What one replica knows about the global batch while it runs a step.

The rule that makes R replicas equal to one device is **shares**: a number that a replica computed
from its examples as if it were alone counts with the replica's share of all examples. Then means
over examples come out right however the batch is split, and what does not depend on the examples (a
regularizer) comes out as it went in. What is no mean over examples (a sum, a mean over weights or
unmasked entries) is first put in a form that is.
"""

import collections
import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow import _distribution
from kdpkit.training.tensorflow._keras_internals import is_recorded

_running = threading.local()


class UndividedError(Exception):
    """A step on the global batch can only be computed without layers that are divided."""


class TraceAgainError(UndividedError):
    """A step is to be traced again, and now it is known what of it is divided."""


class Part(NamedTuple):
    """A replica's part of a tensor that was put together from all replicas'.

    Args:
        tensor: The part.
        step: The step of its examples.
        joined: The tensor of all examples.
    """

    tensor: tf.Tensor
    step: "ReplicaStep"
    joined: tf.Tensor


class ReplicaStep:
    """One replica's step: its examples, its share of all examples, and what it has done so far.

    Args:
        data: The batch as this replica got it; its first tensor gives the examples. Over several
            processes a `Shard`, which is compared with what the others got.
        batch_norm: Whether statistics are of the "global" batch or of a "replica".
    """

    # Of a step on the global batch: that of the replica's examples, and the layers it divides.
    own: "ReplicaStep | None" = None
    divides: Any = None
    # Of one on a replica's examples that some of the user's code sees: raises for its layers.
    rejects: Any = None
    is_divided = False  # whether it is that of a layer's part of the examples
    drew_for_all = False  # numbers that its examples share

    def __init__(self, data: Any, *, batch_norm: str = "global") -> None:
        drawn = _python_random()
        self.batch_norm, self._graph = batch_norm, _graph()
        context = tf.distribute.get_replica_context()
        self.strategy = context.strategy
        self.replicas = context.num_replicas_in_sync
        self.data, fingerprint = _distribution.opened(data)
        self.num_examples = _distribution.examples_in_batch(self.data)
        self.num_global_examples, self.start = self.num_examples, tf.constant(0)
        if self.replicas > 1:
            self.data = tf.nest.map_structure(of_any_length, self.data)
            self.shard = _distribution.shard_of(self.strategy, context.replica_id_in_sync_group)
            self.sizes = self._sizes_of_shards(fingerprint)
            sizes = self.sizes[0]
            self.num_global_examples = tf.reduce_sum(sizes)
            self.start = tf.reduce_sum(tf.where(tf.range(self.replicas) < self.shard, sizes, 0))
        self.is_part = self.replicas > 1  # of a batch
        self.examples = object()  # which these are: parts of others may have other sizes
        self.divided: set[int] = set()  # the variables of these layers, by identity
        self.calls = collections.Counter[int]()  # of layers in them, by their variables' identity
        self._parts: dict[Any, Part] = {}
        self._addends: dict[Any, Any] = {}
        self.assigned: dict[int, Any] = {}  # variables of layers, by identity
        self.equal: set[int] = set()  # those that all replicas assign the same
        _set_python_random(*drawn)

    def _sizes_of_shards(self, fingerprint: Any) -> list[Any]:
        """Return, of each part of the batch, the examples that every replica has.

        With them goes the comparison whether all replicas split one batch.
        """
        parts = [leaf for leaf in tf.nest.flatten(self.data) if leaf is not None]
        own = tf.stack([_distribution.examples_in(part) for part in parts])
        is_own = tf.range(self.replicas) == self.shard
        sizes = tf.where(is_own, own[:, None], 0)
        if fingerprint is None:
            return tf.unstack(self.total(sizes), num=len(parts))
        numbers = [
            tf.reshape(tf.cast(sizes, tf.int64), [-1]),
            _distribution.sums_to_compare(fingerprint),
        ]
        sums = self.total(tf.concat(numbers, axis=0))
        count = len(parts) * self.replicas
        _distribution.compare(sums[count:], self.replicas)
        sizes = tf.reshape(tf.cast(sums[:count], tf.int32), [len(parts), self.replicas])
        return tf.unstack(sizes, num=len(parts))

    def is_here(self) -> bool:
        """Return whether the step is traced here, and not in a condition or a loop inside of it."""
        return self._graph is _graph()

    def reject_divided(self) -> None:
        """Raise if layers are divided where replicas cannot meet."""
        if self.own is not None and self.divides is not None:
            raise UndividedError(
                "A gradient inside a condition or a loop needs what the layers of other replicas "
                "compute. Pass these layers to `replica_exact` in `undivided=[...]`."
            )

    def reject_gradient_of_gradient(self) -> None:
        """Raise if a tape records a gradient that replicas add up, which it would not see.

        A penalty of a gradient takes its gradient inside of another tape.
        """
        if is_recorded() and (self.is_divided or self.divides is not None):
            raise UndividedError(
                "The gradient of a gradient needs what the layers of other replicas compute. Pass "
                "these layers to `replica_exact` in `undivided=[...]`."
            )

    def know(self, joined: tf.Tensor, step: "ReplicaStep", tensor: tf.Tensor) -> None:
        """Note this replica's part of a tensor that was put together from all replicas'."""
        self._parts[_key(joined)] = Part(tensor, step, joined)

    def part_of(self, tensor: Any) -> "Part | None":
        """Return this replica's part of a tensor, if it is known."""
        known = self._parts.get(_key(tensor))
        is_symbolic = known is None and tf.is_symbolic_tensor(tensor)
        if is_symbolic and tensor.op.type == "AddN":  # as tapes sum the gradients of several uses
            terms = [*tensor.op.inputs]
            parts = [part for term in terms if (part := self.part_of(term)) is not None]
            if len(parts) == len(terms):
                total = tf.add_n([part.tensor for part in parts])
                known = self._parts[_key(tensor)] = Part(total, parts[0].step, tensor)
        return known

    def weigh(self, value: Any) -> Any:
        """Multiply by the share. A replica without examples gives zero, whatever it computed."""
        return map_values(lambda v: tf.math.multiply_no_nan(v, self.share_as(v.dtype)), value)

    def share_as(self, dtype: tf.DType) -> Any:
        """Return the share in a type, with all of its precision."""
        wide = dtype if dtype.size >= 4 else tf.float32
        counts = (tf.cast(n, wide) for n in (self.num_examples, self.num_global_examples))
        return tf.cast(tf.math.divide_no_nan(*counts), dtype)

    def if_examples(self, value: Any) -> Any:
        """Return the value, or zero on a replica without examples, which may have computed NaN."""
        return map_values(
            lambda v: tf.math.multiply_no_nan(v, tf.cast(self.num_examples > 0, v.dtype)), value
        )

    def quotient(self, total: Any, divisor: Any) -> Any:
        """Return `total / divisor`, the divisor being the global batch's, in the form of a mean.

        That is times `1 / share`, so that the totals of all replicas count fully.
        """
        num_examples, num_global_examples = (
            tf.cast(n, total.dtype) for n in (self.num_examples, self.num_global_examples)
        )
        divided = tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))
        return divided * tf.math.divide_no_nan(num_global_examples, num_examples)

    def of_examples(self, num_examples: tf.Tensor, *, offset: Any = 0) -> Any:
        """Return this step for some of the replica's examples, from an offset in them on."""
        part = copy.copy(self)
        part.num_examples, part.is_part = num_examples, True
        part.start = self.start + offset
        return part

    def know_addend(self, total: tf.Tensor, own: Any) -> None:
        """Note the gradient of this replica that went into a mean over the replicas."""
        self._addends[_key(total)] = own, total

    def addend_of(self, total: Any) -> Any:
        """Return the gradient of this replica that went into a mean over them; None if unknown."""
        return self._addends.get(_key(total), (None,))[0]

    def global_values(self, values: Any) -> Any:
        """Return the global batch's value of each number in a nest, the same on all replicas."""
        values = tf.nest.map_structure(_as_tensor, values)
        weighed = tf.nest.map_structure(lambda v: self.weigh(v) if _is_float(v) else v, values)
        return self.merge(_add_up, values, weighed)

    def total(self, value: Any) -> Any:
        """Return the sum over the replicas; no gradient flows through it."""
        if self.replicas == 1:
            return value
        # Not `all_reduce` of a context: it would launch one NCCL collective for each count.
        value = tf.stop_gradient(value)
        return self.merge(lambda of, value: of.reduce("SUM", value, axis=None), value)

    def merge(self, function: Callable, *args: Any) -> Any:
        """Call `function(strategy, *args)` once for all replicas, outside of them.

        Raises:
            ValueError: The step is inside a condition, a loop or a `tf.function` of its own.
            UndividedError: It is, and a step on the global batch, in which layers are divided.
        """
        if not self.is_here():
            self.reject_divided()
            checks.fail(
                "Gradients, metrics, batch statistics and shuffled examples make the replicas of "
                "a step meet, which they cannot inside a condition, a loop, a `tf.function`, a "
                "micro-batch or what XLA compiles. Move them out of it, accumulate gradients with "
                "the optimizer's `gradient_accumulation_steps`, or train without `accumulation` "
                "and `jit`.",
                inside=_graph().name,
            )
        drawn = _python_random()

        def called(strategy: tf.distribute.Strategy, *given: Any) -> Any:
            _set_python_random(*drawn)
            try:
                return function(strategy, *given)
            finally:
                _drawn_in_merge[:] = _python_random()

        result = tf.distribute.get_replica_context().merge_call(called, args=args)
        _set_python_random(*_drawn_in_merge)
        return result


# What Python and NumPy have drawn is one state for the threads of all replicas, which run in turn,
# from one meeting to the next. Each goes on from its own, so that all draw the same numbers.
_drawn_in_merge: list[Any] = []


def _python_random() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # what users call


def _set_python_random(of_python: Any, of_numpy: Any) -> None:
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def _key(tensor: Any) -> Any:
    if isinstance(tensor, tuple):
        return tuple(map(_key, tensor))
    is_symbolic = tf.is_symbolic_tensor(tensor)
    return (tensor.op.name, tensor.value_index) if is_symbolic else id(tensor)


def of_any_length(x: Any) -> Any:
    """Hide how many examples a tensor has, which tells their axis from others."""
    if not isinstance(x, tf.Tensor) or tf.executing_eagerly():
        return x
    if not x.shape.rank or x.shape[0] is None:
        return x
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]])


def current_step() -> ReplicaStep | None:
    """Return the step that this thread runs, if it runs one for a `replica_exact` model."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def running(step: Any) -> Iterator[Any]:
    """Make a step this thread's current one. Every replica is traced in a thread of its own."""
    previous = current_step()
    _running.step = step
    try:
        yield step
    finally:
        _running.step = previous


def dense_if_unique(gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Make a sparse gradient dense where it has one slice for each index.

    That is how products with sparse features give it, and a table of positions that is looked up
    once for the batch (`Embedding(...)(ops.arange(length))`). Those of several replicas would be
    several, which Keras' optimizers square one by one. Where examples look a table up it has a
    slice for every lookup, on one device as well, and stays sparse.
    """
    if isinstance(gradient, tf.IndexedSlices) and not tf.executing_eagerly():
        return tf.convert_to_tensor(gradient) if _are_unique(gradient.indices) else gradient
    return gradient


# Of these every entry comes from the entry at its place; `take` of Keras wraps negative indices.
_BY_ENTRY = ("Identity", "Cast", "ExpandDims", "Squeeze", "SelectV2", "Less", "AddV2")
_OF_THE_FIRST_INPUT = ("Reshape", "StridedSlice")  # all of its entries, or some


def _are_unique(indices: tf.Tensor) -> bool:
    """Recognize indices that have been made unique, or that count, whatever the examples are."""
    op = indices.op
    if op.type in ("Unique", "UniqueV2", "Range"):
        return True
    if op.type == "Const":
        value = tf.get_static_value(indices)
        return np.ndim(value) > 0 and np.unique(value).size == np.size(value)
    if op.type in _OF_THE_FIRST_INPUT:
        return _are_unique(op.inputs[0])
    entries = [part for part in op.inputs if part.shape.rank != 0]
    return op.type in _BY_ENTRY and bool(entries) and all(map(_are_unique, entries))


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply an elementwise function to a tensor or to the slices of a sparse gradient."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


def _add_up(strategy: tf.distribute.Strategy, nest: Any, weighed: Any) -> Any:
    one_process = not _distribution.spans_processes(strategy)

    def add(value: Any, weighed: Any) -> Any:
        same = not isinstance(value, tf.distribute.DistributedValues)
        if (same and one_process) or not _is_float(strategy.experimental_local_results(weighed)[0]):
            return value  # all replicas gave this very tensor: a metric's result, or a constant
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, weighed, axis=None)
        # With several processes Keras takes a mean over axis 0: keras-team/keras#20585
        return total if one_process else tf.expand_dims(total, 0)

    return tf.nest.map_structure(add, nest, weighed)


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
