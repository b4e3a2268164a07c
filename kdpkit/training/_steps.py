"""`Steps`: what a `TrainingLoop` asks of a backend, and what its three implementations share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from keras import ops

from kdpkit.training._feed import Feed
from kdpkit.training._objective import Sums


class Steps(Protocol):
    """Runs the steps of a loop.

    `TensorFlowSteps`, and `ParameterServerSteps` where workers train each on their own, are in
    `training/tensorflow/`, `JaxSteps` in `training/jax/`.
    """

    loop: Any
    model: Any
    strategy: Any
    _jit: bool | str  # the argument `jit_compile` of the loop
    _means: dict[str, Any]  # metrics of the losses: of all of it, and of the outputs, if several

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the next training step."""
        return bool(self.model.jit_compile if self._jit == "auto" else self._jit)

    @property
    def means(self) -> list[Any]:
        return [*self._means.values()]

    def scope(self) -> AbstractContextManager[Any]:
        """Enter where variables are made."""

    def guard(self) -> AbstractContextManager[Any]:
        """Enter what explains that another process is gone."""

    def open(self, dataset: Any, name: str, **steps: int | None) -> Feed:
        """Check a dataset, spread its batches over the replicas, and build the model for them."""

    def build(self, feed: Feed, *, training: bool) -> None:
        """Make all variables before the first step."""

    def reset_metrics(self) -> None:
        """Begin an epoch or an evaluation."""
        self.model.reset_metrics()
        for mean in self.means:
            mean.reset_state()

    def train(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many training steps; give how many there were, and loss and metrics."""

    def test(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many evaluation steps; give how many there were, and loss and metrics."""

    def predict(self, batches: Any, steps: int) -> tuple[int, list[Any]]:
        """Predict up to so many batches; give how many there were, and their predictions."""

    def finish_training(self) -> None:
        """Set the weights to their averages, if the optimizer keeps such."""
        with self.scope():
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    def _logs(self) -> dict[str, Any]:
        losses = {mean.name: mean.result() for mean in self.means}
        return self.model.get_metrics_result() | losses

    def _log_losses(self, sums: Sums, as_mean: Callable[[Any], tuple[Any, Any]]) -> list[Any]:
        """Log the losses; return the factors that put real divisors in the place of plain ones.

        Args:
            sums: Of all examples of the global batch where it is a divisor.
            as_mean: Returns a loss as a `Mean` counts it: value and weight.
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
