"""The batches of a dataset for a loop, epoch by epoch, and some steps at a time."""

from collections.abc import Callable
from typing import Any

from kdpkit._internal import checks


class Feed:
    """Iterates over a dataset in epochs.

    Args:
        name: The argument that the dataset was passed as, for errors.
        batches: The dataset.
        steps_per_epoch: Batches in an epoch, which begins where the last one stopped. None takes
            all of the dataset in each epoch.
        length: Returns the number of batches in the dataset, or None if it is not known.
        end: Called when an epoch has taken all of the dataset.
    """

    def __init__(
        self,
        name: str,
        batches: Any,
        *,
        steps_per_epoch: int | None,
        length: Callable[[], int | None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = steps_per_epoch or length()
        self.batches = batches
        self._name = name
        self._steps_per_epoch = steps_per_epoch
        self._length = length
        self._end = end
        self._iterator: Any = None

    def run_epoch(
        self,
        run: Callable[[Any, int], tuple[int, Any]],
        steps_per_call: int,
        callbacks: Any,
        mode: str,
    ) -> Any:
        """Run the steps of an epoch, many in a call; return the result of the last call.

        `run` runs up to so many steps on an iterator, and returns how many, and their result. The
        callbacks' methods for the mode, "train", "test" or "predict", are called around it.
        """
        begin, end = (getattr(callbacks, f"on_{mode}_batch_{when}") for when in ("begin", "end"))
        stop = {"train": "stop_training", "test": "stop_evaluating"}.get(mode, "stop_predicting")
        may_restart = self._steps_per_epoch is not None and self._iterator is not None
        if not may_restart:
            self._iterator = iter(self.batches)
        self.steps = self._steps_per_epoch or self._length()
        steps_done, result = 0, None
        while steps_done != self.steps:
            count = steps_per_call
            if self.steps is not None:
                count = min(count, self.steps - steps_done)
            begin(steps_done)
            done, new_result = run(self._iterator, count)
            if done == 0 and steps_done == 0 and may_restart:
                # The last epoch ended at the end of the dataset.
                self._iterator = iter(self.batches)
                done, new_result = run(self._iterator, count)
            steps_done += done
            if done:
                result = new_result
                end(steps_done - 1, result)
            if getattr(callbacks.model, stop):
                return result
            if done < count:
                break
        if self.steps is not None and 0 < steps_done < self.steps:
            checks.fail(
                f"`{self._name}` ended after {steps_done} of the {self.steps} steps of an epoch.",
                remedy="Ask for fewer steps in an epoch, leave them out to train on the complete "
                "dataset, or `.repeat()` it.",
            )
        if steps_done == 0:
            checks.fail(f"`{self._name}` gave no batch, so there is nothing to compute.")
        if self._steps_per_epoch is None:
            self._end()
        return result
