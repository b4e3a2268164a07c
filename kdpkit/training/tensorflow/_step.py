"""What one replica knows about the global batch while it runs a step.

The rule that makes R replicas equal to one device is **shares**: a number that a replica computed
from its examples as if it were alone counts with the replica's share of all examples. Then means
over examples come out right however the batch is cut, and what does not depend on the examples (a
regularizer) comes out as it went in. What is no mean over examples (a sum, a mean over weights or
unmasked entries) is first put in a form that is.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._losses import sum_over_replicas
from kdpkit.training.tensorflow import _workers
from kdpkit.training.tensorflow._verification_report import Kind

_running = threading.local()


class ReplicaStep:
    """One replica's step: its examples, its share of all examples, and what it has done so far.

    Args:
        data: The batch as this replica got it; its first tensor gives the examples. Over several
            processes a `Shard`, which is compared with what the others got.
        share_in_loss: Whether the loss carries the share from `optimizer.scale_loss` on (Keras'
            own step), so that the gradients do already, and need not be multiplied.
    """

    def __init__(self, data: Any, *, share_in_loss: bool = True, trial: Any = None) -> None:
        context = tf.distribute.get_replica_context()
        self.strategy = context.strategy
        self.replicas = context.num_replicas_in_sync
        self.data, fingerprint = _workers.opened(data)
        self.num_examples = _workers.examples_in_batch(self.data)
        self.num_global_examples, self.start = self.num_examples, tf.constant(0)
        if self.replicas > 1:
            self.data = tf.nest.map_structure(of_any_length, self.data)
            shard = _workers.shard_of(self.strategy, context.replica_id_in_sync_group)
            sizes = self._sizes(shard, fingerprint)
            self.num_global_examples = tf.reduce_sum(sizes)
            self.start = tf.reduce_sum(tf.where(tf.range(self.replicas) < shard, sizes, 0))
        self.is_part = self.replicas > 1  # of a batch
        self.share = _share(self.num_examples, self.num_global_examples)
        self.share_in_loss = share_in_loss
        self.trial = trial
        self.gathered = False  # whether a loss is being computed on the examples of all replicas
        # Of a step on the global batch: that of the replica's examples, and the layers it divides.
        self.own: ReplicaStep | None = None
        self.divides: Callable[[Any], bool] | None = None
        self._graph = _graph()
        self.assigned: list[Any] = []  # variables of layers

    def _sizes(self, shard: Any, fingerprint: Any) -> Any:
        """Return the examples of every shard, and compare whether all replicas cut one batch."""
        sizes = tf.where(tf.range(self.replicas) == shard, self.num_examples, 0)
        if fingerprint is None:
            return sum_over_replicas(sizes)
        numbers = [tf.cast(sizes, tf.int64), _workers.sums_to_compare(fingerprint)]
        sums = sum_over_replicas(tf.concat(numbers, axis=0))
        _workers.compare(sums[self.replicas :], self.replicas)
        return tf.cast(sums[: self.replicas], tf.int32)

    def weigh(self, value: Any) -> Any:
        """Multiply by the share. A replica without examples gives zero, whatever it computed."""
        return _map_values(lambda v: tf.math.multiply_no_nan(v, self.share_as(v.dtype)), value)

    def share_as(self, dtype: tf.DType) -> Any:
        """Return the share in a type, with all of its precision."""
        wide = dtype if dtype.size >= 4 else tf.float32
        return tf.cast(_share(self.num_examples, self.num_global_examples, wide), dtype)

    def if_examples(self, value: Any) -> Any:
        """Return the value, or zero on a replica without examples, which may have computed NaN."""
        return _map_values(
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
        part.share = _share(num_examples, self.num_global_examples)
        return part

    @contextlib.contextmanager
    def on_all_examples(self) -> Iterator[None]:
        """Compute, meanwhile, on the examples of all replicas, as one device does."""
        self.gathered = True
        try:
            yield
        finally:
            self.gathered = False

    def counts_examples(self, tensor: tf.Tensor) -> bool:
        """Return, while it is traced, whether a tensor has an entry for each example."""
        size = tensor.shape[0]
        return size is None or (tf.executing_eagerly() and size == int(self.num_examples))

    @property
    def noting(self) -> Any:
        """The trial of this step; None in a graph inside of it, whose tensors it cannot have."""
        return self.trial if self._graph is _graph() else None

    def note_loss(self, name: str, value: Any) -> None:
        """Note a loss of these examples, while the step is tried."""
        if self.noting is None or value.shape.rank != 0:
            return
        self.merge(self.trial.noting_sum(Kind.LOSS, name), self.weigh(value))
        if self.trial.detailed:
            self.merge(self.trial.noting_sum(Kind.SUMMED_LOSS, name), self.if_examples(value))

    def note_gradients_of_tape(self, variables: list[Any], gradients: list[Any]) -> None:
        """Note gradients as a tape gave them, while the step is tried."""
        if self.noting is not None:
            self.trial.of_tape += [gradient for gradient in gradients if gradient is not None]
        if self.noting is not None and self.trial.detailed:
            for variable, gradient in zip(variables, gradients, strict=True):
                if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                    note = self.trial.noting_sum(Kind.OF_TAPE, variable.path)
                    weigh = self.if_examples if self.share_in_loss else self.weigh
                    self.merge(note, weigh(gradient))

    def global_values(self, values: Any) -> Any:
        """Return the global batch's value of each number in a nest, the same on all replicas."""
        values = tf.nest.map_structure(_as_tensor, values)
        self.note_roots(values)
        weighed = tf.nest.map_structure(lambda v: self.weigh(v) if _is_float(v) else v, values)
        return self.merge(_add_up, values, weighed)

    def total(self, value: Any) -> Any:
        """Return the sum over the replicas; no gradient flows through it."""
        total = sum_over_replicas(value)
        self.note_shared(total)
        return total

    def note_shared(self, values: Any) -> None:
        """Note what is not read in the step's graph: what all replicas have alike, above all."""
        if self.trial is not None:
            parts = tf.nest.flatten(values, expand_composites=True)
            self.trial.shared += filter(tf.is_symbolic_tensor, parts)

    def note_roots(self, values: Any) -> None:
        """Note what the step is for, while it is tried: losses, logs, what metrics are given."""
        if self.noting is not None:
            tensors = tf.nest.flatten(values, expand_composites=True)
            self.trial.roots += [tensor for tensor in tensors if isinstance(tensor, tf.Tensor)]

    def note_examples(self, batch: Any) -> None:
        """Note examples that the step begins with, while it is tried: a micro-batch, too."""
        if self.noting is not None:
            self.trial.note_examples(batch)

    def note_layer(self, inputs: Any, outputs: Any) -> None:
        """Note, while the step is tried, what was computed from each example by itself."""
        if self.noting is not None:
            flat = (tf.nest.flatten(of, expand_composites=True) for of in (inputs, outputs))
            given, computed = ([x for x in of if tf.is_symbolic_tensor(x)] for of in flat)
            self.trial.layers.append((given, computed))

    def merge(self, function: Callable, *args: Any) -> Any:
        """Call `function(strategy, *args)` once for all replicas, outside of them.

        Raises:
            ValueError: The step is inside a condition, a loop or a `tf.function` of its own.
        """
        if self._graph is not _graph():
            checks.fail(
                "Gradients, metrics, batch statistics and gathered examples make the replicas of "
                "a step meet, which they cannot inside a condition, a loop, a `tf.function`, a "
                "micro-batch or what XLA compiles. Move them out of it, accumulate gradients with "
                "the optimizer's `gradient_accumulation_steps`, or train without `accumulation` "
                "and `jit`.",
                inside=_graph().name,
            )
        merged = tf.distribute.get_replica_context().merge_call(function, args=args)
        self.note_shared(merged)
        return merged


def of_any_length(x: Any) -> Any:
    """Hide how many examples a tensor has, which tells their axis from others."""
    if not isinstance(x, tf.Tensor) or tf.executing_eagerly() or not x.shape.rank:
        return x
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]])


def _share(
    num_examples: tf.Tensor, num_global_examples: tf.Tensor, dtype: tf.DType = tf.float32
) -> Any:
    return tf.math.divide_no_nan(tf.cast(num_examples, dtype), tf.cast(num_global_examples, dtype))


def current_step() -> ReplicaStep | None:
    """Return the step that this thread runs, if it runs one for a `replica_exact` model."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def running(step: ReplicaStep) -> Iterator[ReplicaStep]:
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
_BY_ENTRY = ("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze", "SelectV2", "Less", "AddV2")


def _are_unique(indices: tf.Tensor) -> bool:
    """Recognize indices that have been made unique, or that count, whatever the examples are."""
    op = indices.op
    if op.type in ("Unique", "UniqueV2", "Range"):
        return True
    if op.type == "Const":
        value = tf.get_static_value(indices)
        return np.ndim(value) > 0 and np.unique(value).size == np.size(value)
    entries = [part for part in op.inputs if part.shape.rank != 0]
    if op.type in ("Reshape", "StridedSlice"):  # which keep the entries, or leave some out
        entries = entries[:1]
    return (
        op.type in (*_BY_ENTRY, "StridedSlice") and bool(entries) and all(map(_are_unique, entries))
    )


def _map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply an elementwise function to a tensor or to the slices of a sparse gradient."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


def _add_up(strategy: tf.distribute.Strategy, nest: Any, weighed: Any) -> Any:
    one_process = not _workers.spans_processes(strategy)

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
