"""The steps of `TrainingLoop` under `TPUStrategy`: each replica runs a step on its examples.

Nobody can choose a device for an operation there: XLA compiles the step of a replica as a whole. So
the step cannot be on the global batch, as it is elsewhere. A replica's losses are divided by the
examples of all, its gradients are added up before the optimizer clips and applies them, and metrics
count the examples of all.

Left out, because a replica sees its own examples alone: a loss, a metric or a layer that compares
examples, batch statistics of all of them (there is a warning), random numbers as one device draws
them, and micro-batches. No TPU was available: this is tested with CPUs in place of its cores.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._objective import Sums
from kdpkit.training._remat import rematerialised
from kdpkit.training.tensorflow import _batch_norm, _global_batches, _keras_internals
from kdpkit.training.tensorflow._loop import TensorFlowSteps
from kdpkit.training.tensorflow._loop_gradients import combined, forward, forward_and_backward
from kdpkit.training.tensorflow._remat import checkpointed


class TpuSteps(TensorFlowSteps):
    """Runs the steps of a loop on each replica, which the strategy compiles whatever `jit` says."""

    counts_once = False  # replicas count their examples, and are added up

    def __init__(self, loop: Any, strategy: tf.distribute.Strategy | None, jit: Any) -> None:
        del jit
        super().__init__(loop, strategy, jit=False)
        if loop.accumulation > 1:
            checks.fail(
                "On a TPU each replica computes its examples at once.",
                accumulation=loop.accumulation,
                remedy="Leave `accumulation` out.",
            )

    def _distributed(self, dataset: Any, name: str) -> Any:  # noqa: ARG002 errors name none
        return self.strategy.experimental_distribute_dataset(dataset)

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        if self.loop.batch_norm == _batch_norm.GLOBAL:
            _batch_norm.warn_of_local_statistics(self.model, self.mesh.num_parts)

    def _train_step(self, batch: Any, *, jit: bool = False) -> None:
        del jit
        optimizer = self.model.optimizer  # is given sums of gradients, which it may clip
        summed = _keras_internals.replaced(optimizer, "_all_reduce_sum_gradients", lambda of: of)
        with summed, rematerialised(self.loop, checkpointed):
            self.strategy.run(self._train_replica, args=(batch,))

    def _test_step(self, batch: Any) -> None:
        self.strategy.run(self._test_replica, args=(batch,))

    def _predict_step(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self.strategy.run(functools.partial(self.model, training=False), args=(x,))
        return keras.tree.map_structure(
            lambda output: tf.concat(self.strategy.experimental_local_results(output), 0), outputs
        )

    def _train_replica(self, batch: Any) -> None:
        counts = _counts(batch)
        sums, predictions, _ = forward_and_backward(self.loop, batch, counts)
        self._update_metrics(batch, predictions)
        own = combined(sums.gradients, self._update_losses_of(counts, sums))
        self._update([dict(zip(own, _sums([*own.values()]), strict=True))], [])

    def _test_replica(self, batch: Any) -> None:
        counts = _counts(batch)
        sums, predictions = forward(self.loop, batch, counts, training=False)
        self._update_metrics(batch, predictions)
        self._update_losses_of(counts, sums)

    def _update_losses_of(self, counts: tuple[Any, Any], sums: Sums) -> list[Any]:
        """Log a replica's part of the losses, in the form of a mean over its examples."""
        real = {name: _sums(of) for name, of in sums.real.items()}

        def as_mean(part: Any) -> tuple[Any, Any]:
            own, of_all = (tf.cast(count, part.dtype) for count in counts)
            return tf.math.divide_no_nan(part * of_all, own), own

        return self._log_losses(sums._replace(real=real), as_mean)


def _counts(batch: Any) -> tuple[Any, Any]:
    """Return how many examples a replica has, and how many all have."""
    own = _global_batches.examples_in_batch(batch)
    return own, _sums(own)


def _sums(values: Any) -> Any:
    context: Any = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)
