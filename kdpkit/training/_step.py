"""What one replica knows about the whole batch while it runs a step.

The rule that makes R replicas equal to one device is **shares**: a number that a replica computed
from its rows as if it were alone counts with the replica's share of all rows. Then means over rows
come out right however the batch is cut, and what does not depend on the rows (a regularizer) comes
out as it went in. What is no mean over rows (a sum, a mean over weights or unmasked entries) is
first put in a form that is.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdpkit import _checks
from kdpkit.training import _workers
from kdpkit.training._losses import sum_over_replicas

_running = threading.local()


class ReplicaStep:
    """One replica's step: its rows, its share of all rows, and what it has done so far.

    Args:
        data: The batch as this replica got it; its first tensor gives the rows. Over several
            processes a `Piece`, which is compared with what the others got.
        share_in_loss: Whether the loss carries the share from `optimizer.scale_loss` on (Keras'
            own step), so that the gradients do already, and need not be multiplied.
    """

    def __init__(self, data: Any, *, share_in_loss: bool = True) -> None:
        context = tf.distribute.get_replica_context()
        self.replica = context.replica_id_in_sync_group
        self.replicas = context.num_replicas_in_sync
        self.data, seal = _workers.opened(data)
        self.rows = _workers.rows_of_batch(self.data)
        self.all_rows = self._count_rows(seal)
        self.share = tf.math.divide_no_nan(
            tf.cast(self.rows, tf.float32), tf.cast(self.all_rows, tf.float32)
        )
        self.share_in_loss = share_in_loss
        self._graph = _graph()
        self.saw_a_loss = False
        self.applied_gradients = False
        self.assigned: list[Any] = []  # variables of layers

    def _count_rows(self, seal: Any) -> Any:
        """Sum the rows over the replicas, and with them what tells whether all cut one batch."""
        if seal is None:
            return sum_over_replicas(self.rows)
        numbers = [[tf.cast(self.rows, tf.int64)], _workers.sums_to_compare(seal)]
        sums = sum_over_replicas(tf.concat(numbers, axis=0))
        _workers.compare(sums[1:], self.replicas)
        return tf.cast(sums[0], tf.int32)

    def weigh(self, value: Any) -> Any:
        """Multiply by the share. A replica without rows gives zero, whatever it computed."""
        return _map_values(
            lambda v: tf.math.multiply_no_nan(v, tf.cast(self.share, v.dtype)), value
        )

    def if_rows(self, value: Any) -> Any:
        """Give the value, or zero on a replica without rows, which may have computed NaN."""
        return _map_values(
            lambda v: tf.math.multiply_no_nan(v, tf.cast(self.rows > 0, v.dtype)), value
        )

    def quotient(self, total: Any, divisor: Any) -> Any:
        """Give `total / divisor`, the divisor being the whole batch's, in the form of a mean.

        That is times `1 / share`, so that the totals of all replicas count fully.
        """
        rows, all_rows = (tf.cast(n, total.dtype) for n in (self.rows, self.all_rows))
        divided = tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))
        return divided * tf.math.divide_no_nan(all_rows, rows)

    def own_seed(self, seed: Any) -> Any:
        """Shift a seed by the replica's number; the first replica keeps it."""
        # A large odd step keeps replicas apart from seeds that users write: 1, 2, 3.
        shift = tf.cast(self.replica, seed.dtype) * tf.constant(0x9E3779B1, seed.dtype)
        return seed + tf.stack([shift, tf.zeros_like(shift)])

    def of_rows(self, rows: Any) -> "ReplicaStep":
        """Give this step as it is for some of the replica's rows."""
        part = copy.copy(self)
        part.rows = rows
        part.share = tf.math.divide_no_nan(
            tf.cast(rows, tf.float32), tf.cast(self.all_rows, tf.float32)
        )
        return part

    def whole(self, values: Any) -> Any:
        """Give the whole batch's value of each number in a nest, the same on all replicas."""
        values = tf.nest.map_structure(_as_tensor, values)
        weighed = tf.nest.map_structure(lambda v: self.weigh(v) if _is_float(v) else v, values)
        return self.merge(_add_up, values, weighed)

    def merge(self, function: Callable, *args: Any) -> Any:
        """Call `function(strategy, *args)` once for all replicas, outside of them.

        Raises:
            ValueError: The step is inside a condition, a loop or a `tf.function` of its own.
        """
        if self._graph is not _graph():
            _checks.refuse(
                "`train_step` works on gradients or metrics inside a condition, a loop or a "
                "`tf.function`, where the replicas cannot meet. Move them out of it, or write the "
                "step as `TrainingLoop.per_example_loss`.",
                inside=_graph().name,
            )
        return tf.distribute.get_replica_context().merge_call(function, args=args)


def current_step() -> ReplicaStep | None:
    """Give the step that this thread runs, if it runs one for a `replica_exact` model."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def running(step: ReplicaStep) -> Iterator[ReplicaStep]:
    """Make a step this thread's current one. Every replica is traced in a thread of its own."""
    _running.step = step
    try:
        yield step
    finally:
        _running.step = None


def dense_if_unique(gradient: Any) -> Any:
    """Make a sparse gradient dense where it has added up equal indices already.

    That is how products with sparse features give it: one slice for a feature. Those of several
    replicas would be several, which Keras' optimizers square one by one. An embedding's gradient
    has a slice for every lookup, on one device as well, and stays sparse.
    """
    if isinstance(gradient, tf.IndexedSlices) and not tf.executing_eagerly():
        source = gradient.indices.op
        while source.type in ("Reshape", "Identity", "Cast"):
            source = source.inputs[0].op
        if source.type in ("Unique", "UniqueV2"):
            return tf.convert_to_tensor(gradient)
    return gradient


def _map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply an elementwise function to a tensor or to the slices of a sparse gradient."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


def _add_up(strategy: Any, nest: Any, weighed: Any) -> Any:
    one_process = not _workers.spans_processes(strategy)

    def add(value: Any, weighed: Any) -> Any:
        same = not isinstance(value, tf.distribute.DistributedValues)
        if (same and one_process) or not _is_float(strategy.experimental_local_results(weighed)[0]):
            return value  # all replicas gave this very tensor: a metric's result, or a constant
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, weighed, axis=None)
        return total if one_process else tf.expand_dims(total, 0)  # Keras takes a mean over axis 0

    return tf.nest.map_structure(add, nest, weighed)


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
