"""The batches of a dataset for a loop: epoch by epoch, some steps at a time."""

from collections.abc import Callable
from typing import Any

from kdpkit._internal import checks


class Feed:
    """Iterates over a dataset in epochs: all of it, or some steps after those of the last epoch.

    An epoch has `wanted` batches, or all, of which `length` returns the number if it is known; then
    `end` is called when they are taken.
    """

    def __init__(
        self,
        name: str,
        batches: Any,
        *,
        wanted: int | None,
        length: Callable[[], int | None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = wanted or length()
        self.batches = batches
        self._name = name
        self._wanted = wanted
        self._length = length
        self._end = end
        self._iterator: Any = None
        self._may_restart = False

    def start_epoch(self) -> None:
        self._may_restart = self._wanted is not None and self._iterator is not None
        if not self._may_restart:
            self._iterator = iter(self.batches)
        self.steps = self._wanted or self._length()

    def run(self, steps: Callable[[Any, int], tuple[int, Any]], count: int) -> tuple[int, Any]:
        """Run up to `count` steps on the next batches; return how many, and the result."""
        done, result = steps(self._iterator, count)
        if done == 0 and self._may_restart:  # the last epoch ended where the dataset does
            self._iterator = iter(self.batches)
            done, result = steps(self._iterator, count)
        self._may_restart = False
        return done, result

    def end_epoch(self, done: int) -> None:
        """End an epoch, and reject one that had no steps, or fewer than it should."""
        if self.steps is not None and 0 < done < self.steps:
            checks.fail(
                f"`{self._name}` ended after {done} of the {self.steps} steps of an epoch.",
                remedy="Ask for fewer steps in an epoch, leave them out to train on the complete "
                "dataset, or `.repeat()` it.",
            )
        if done == 0:
            checks.fail(f"`{self._name}` gave no batch, so there is nothing to compute.")
        if self._wanted is None:
            self._end()
