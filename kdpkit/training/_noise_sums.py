"""Sums over the steps of an epoch, for the gradient noise scale, added up on the device.

A batch of N examples is cut in P parts that have examples: those of the replicas, and their
micro-batches. The mean gradient of a part of n examples is off the true gradient G by noise of the
size tr(S) / n, and that of the global batch by tr(S) / N. So with the squared norms A, the mean
over the parts weighted by their examples, and B, that of the global batch,

    E[A] = |G|^2 + tr(S) P / N        E[B] = |G|^2 + tr(S) / N

for parts of any sizes, and what follows is without bias: `tr(S) = N (A - B) / (P - 1)` and
`|G|^2 = B - (A - B) / (P - 1)`. With even parts these are the estimates of McCandlish et al. 2018,
appendix A.1. A loop's parts add up to the gradient of the batch: each has the factor n / N already,
and its squared norm counts in A with N / n.
"""

import keras
from keras import ops

from kdpkit.training._noise_scale import NoiseScale, estimated
from kdpkit.training._tensors import Tensor

_GROUPS = 64  # of steps; their differences show how certain an estimate is


class NoiseSums:
    """The sums over steps that the noise scale is estimated from, in groups of steps.

    Steps are dealt out to the groups in turn: the first one gets a step, and becomes the last. Each
    step counts with its examples, since the gradient of a small batch is noisier. The sums are in
    one variable, which a compiled loop can hold.
    """

    name = "noise_scale"

    def __init__(self) -> None:
        self._sums = keras.Variable(
            ops.zeros((_GROUPS, 4)),
            trainable=False,
            dtype="float32",
            aggregation="only_first_replica",
            name=self.name,
        )

    @property
    def variables(self) -> list[keras.Variable]:
        return [self._sums]

    def reset_state(self) -> None:
        """Begin an epoch."""
        self._sums.assign(ops.zeros(self._sums.shape))

    def add(
        self,
        *,
        parts: Tensor | int,
        num_examples: Tensor | int,
        of_parts: Tensor | float,
        of_whole: Tensor | float,
    ) -> None:
        """Add a step, unless fewer than two parts had examples or a gradient is not finite.

        Args:
            parts: The parts of the batch that had examples.
            num_examples: The examples of the batch.
            of_parts: The sum over the parts of `examples / examples of the part * |part|^2`, where
                the parts add up to the gradient.
            of_whole: The squared norm of the gradient.
        """
        parts, num_examples, of_parts, of_whole = (
            ops.cast(number, "float32") for number in (parts, num_examples, of_parts, of_whole)
        )
        # tr(S) / N; NaN or infinite of a batch in one part
        of_noise = (of_parts - of_whole) / ops.maximum(parts - 1, 0)
        of_gradient = of_whole - of_noise
        step = ops.stack(
            [
                ops.ones_like(num_examples),
                num_examples,
                num_examples * of_gradient,
                num_examples**2 * of_noise,
            ]
        )
        first, *others = ops.split(ops.convert_to_tensor(self._sums), [1])
        counted = first + ops.where(ops.isfinite(of_noise), step, 0.0)
        self._sums.assign(ops.concatenate([*others, counted]))

    def estimate(self, *, batches_in_an_update: int) -> NoiseScale:
        """Estimate the noise scale from the steps so far."""
        sums = ops.convert_to_numpy(self._sums)
        return estimated(sums, batches_in_an_update=batches_in_an_update)
