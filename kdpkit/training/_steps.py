"""`Steps`: what a `TrainingLoop` asks of a backend, and each of the three implementations gives."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from kdpkit.training._feed import Feed


class Steps(Protocol):
    """Runs the steps of a loop.

    `TensorFlowSteps`, and `ParameterServerSteps` where workers train each on their own, are in
    `training/tensorflow/`, `JaxSteps` in `training/jax/`.
    """

    strategy: Any

    @property
    def jit(self) -> bool:
        """Whether XLA compiles the next training step."""

    @property
    def is_jit_chosen(self) -> bool:
        """Whether that is settled: a trial may be under way."""

    @property
    def means(self) -> list[Any]:
        """The metrics of the losses."""

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

    def train(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many training steps; give how many there were, and loss and metrics."""

    def test(self, batches: Any, steps: int) -> tuple[int, dict[str, Any]]:
        """Run up to so many evaluation steps; give how many there were, and loss and metrics."""

    def predict(self, batches: Any, steps: int) -> tuple[int, list[Any]]:
        """Predict up to so many batches; give how many there were, and their predictions."""

    def finish_training(self) -> None:
        """Set the weights to their averages, if the optimizer keeps such."""
