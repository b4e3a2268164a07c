"""`Steps`: what a `TrainingLoop` needs from a backend, and what all backends share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from keras import ops

from kdpkit.training._feed import Feed
from kdpkit.training._objective import Sums


class Steps(Protocol):
    """Runs the steps of a loop.

    `TensorFlowSteps`, `ParameterServerSteps` and `TpuSteps` are in `training/tensorflow/`,
    `JaxSteps` is in `training/jax/`.
    """

    loop: Any
    model: Any
    strategy: Any
    _jit: bool | str  # the argument `jit_compile` of the loop
    # The metrics of the losses: "" is the total, and each of several outputs has its own.
    _means: dict[str, Any]

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the next training step."""
        return bool(self.model.jit_compile if self._jit == "auto" else self._jit)

    @property
    def means(self) -> list[Any]:
        return [*self._means.values()]

    def scope(self) -> AbstractContextManager[Any]:
        """Return the scope to create variables in."""

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context that explains errors which other processes caused."""

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        """Check a dataset, distribute its batches over the devices, and build the model."""

    def build(self, feed: Feed, *, training: bool) -> None:
        """Create all variables before the first step."""

    def reset_metrics(self) -> None:
        """Reset all metrics before an epoch or an evaluation."""
        self.model.reset_metrics()
        for mean in self.means:
            mean.reset_state()

    def train(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to `steps` training steps; return their number, and loss and metrics."""

    def test(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to `steps` evaluation steps; return their number, and loss and metrics."""

    def predict(self, batches: Any, steps: int) -> tuple[int, list[Any]]:
        """Predict up to `steps` batches; return their number, and the predictions."""

    def finish_training(self) -> None:
        """Set the weights to their moving averages, if the optimizer keeps these."""
        with self.scope():
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _logs(self) -> dict[str, Any]:
        losses = {mean.name: mean.result() for mean in self.means}
        return self.model.get_metrics_result() | losses

    def _log_losses(self, sums: Sums, as_mean: Callable[[Any], tuple[Any, Any]]) -> list[Any]:
        """Update the metrics of the losses; return a factor for the gradients of each real one.

        `as_mean` returns a loss as the value and weight to update a `Mean` with.
        """
        factors = {name: ops.divide_no_nan(1.0, real) for name, real in sums.real.items()}
        total = sums.additional
        for name, loss in sums.losses.items():
            divided = loss * factors.get(name, 1.0)
            total += self.loop.loss.weight(name) * divided
            if name:
                self._means[name].update_state(*as_mean(divided))
        self._means[""].update_state(*as_mean(total))
        return [*factors.values()]
