"""The batches of a dataset, as a loop takes them: epoch by epoch, some steps at a time."""

from collections.abc import Callable
from typing import Any

from kdpkit import _checks


class Feed:
    """Hands out an iterator for every epoch: the whole dataset, or some steps that go on in it.

    Args:
        name: The argument that the dataset was given as, for messages.
        batches: What an iterator is made from.
        wanted: Batches in an epoch, which then begins where the last one stopped; None takes all.
        length: Gives the batches that there are in an epoch; None if that shows only at its end.
    """

    def __init__(
        self, name: str, batches: Any, *, wanted: int | None, length: Callable[[], int | None]
    ) -> None:
        self.steps = wanted or length()
        self.batches = batches
        self._name = name
        self._wanted = wanted
        self._length = length
        self._iterator: Any = None
        self._may_restart = False

    def start_epoch(self) -> None:
        """Begin an epoch."""
        self._may_restart = self._wanted is not None and self._iterator is not None
        if not self._may_restart:
            self._iterator = iter(self.batches)
        self.steps = self._wanted or self._length()

    def run(self, steps: Callable[[Any, int], tuple[int, Any]], count: int) -> tuple[int, Any]:
        """Run up to `count` steps on the batches that come next; give how many, and the result."""
        done, result = steps(self._iterator, count)
        if done == 0 and self._may_restart:  # the last epoch ended where the dataset does
            self._iterator = iter(self.batches)
            done, result = steps(self._iterator, count)
        self._may_restart = False
        return done, result

    def check_steps(self, done: int) -> None:
        """Refuse an epoch that had no steps, or fewer than it should."""
        if self.steps is not None and 0 < done < self.steps:
            _checks.refuse(
                f"`{self._name}` ended after {done} of the {self.steps} steps of an epoch.",
                remedy="Ask for fewer steps in an epoch, leave them out to train on whole passes "
                "through the dataset, or `.repeat()` it.",
            )
        if done == 0:
            _checks.refuse(f"`{self._name}` gave no batch, so there is nothing to compute.")
