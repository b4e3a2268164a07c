"""The steps of `TrainingLoop` under `TPUStrategy`: each replica runs a step on its examples.

XLA compiles the step of a replica as one, and no operation can be put on a device. So the step
cannot be on the global batch, as under other strategies. A replica's losses are divided by the
number of all examples, its gradients are added up before the optimizer clips and applies them, and
metrics count the examples of all replicas.

Not supported, because a replica has only its own examples: a loss, a metric or a layer that
compares examples, batch statistics of all of them (there is a warning), random numbers as one
device draws them, and micro-batches. No TPU was available: this is tested with CPUs in place of its
cores.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._objective import Sums
from kdpkit.training._remat import rematerialised
from kdpkit.training.tensorflow import _batch_norm, _global_batches, _keras_internals
from kdpkit.training.tensorflow._loop import (
    TensorFlowSteps,
    combined,
    forward,
    forward_and_backward,
)
from kdpkit.training.tensorflow._remat import checkpointed


class TpuSteps(TensorFlowSteps):
    """Runs the steps of a loop on each replica, which the strategy compiles whatever `jit` is."""

    counts_once = False  # Replicas count their examples, and TensorFlow adds them up.

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
        # The optimizer gets sums of gradients already, because it may clip them.
        is_summed = _keras_internals.replaced(
            self.model.optimizer, "_all_reduce_sum_gradients", lambda gradients: gradients
        )
        with is_summed, rematerialised(self.loop, checkpointed):
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
        gradients = combined(sums.gradients, self._update_losses_of_replica(counts, sums))
        self._update([dict(zip(gradients, _sums([*gradients.values()]), strict=True))], [])

    def _test_replica(self, batch: Any) -> None:
        counts = _counts(batch)
        sums, predictions = forward(self.loop, batch, counts, training=False)
        self._update_metrics(batch, predictions)
        self._update_losses_of_replica(counts, sums)

    def _update_losses_of_replica(self, counts: tuple[Any, Any], sums: Sums) -> list[Any]:
        """Log a replica's part of the losses, in the form of a mean over its examples."""
        real = {name: _sums(divisor) for name, divisor in sums.real.items()}

        def as_mean(loss: Any) -> tuple[Any, Any]:
            num_examples, num_global_examples = (tf.cast(count, loss.dtype) for count in counts)
            mean = tf.math.divide_no_nan(loss * num_global_examples, num_examples)
            return mean, num_examples

        return self._log_losses(sums._replace(real=real), as_mean)


def _counts(batch: Any) -> tuple[Any, Any]:
    """Return how many examples a replica has, and how many all have."""
    num_examples = _global_batches.examples_in_batch(batch)
    return num_examples, _sums(num_examples)


def _sums(values: Any) -> Any:
    context: Any = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)
