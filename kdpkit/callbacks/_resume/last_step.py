"""The last step of an epoch, for a run that continues with the validation after it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

_SECONDS = 60.0  # more than a thread takes that only has to pass logs on


class LastStep:
    """What the last step of an epoch returned.

    Attributes:
        before_validation: What a validation changes, as it was before.
        is_returned: Whether an earlier run trained this step.
    """

    def __init__(self) -> None:
        self.is_returned = False
        self.before_validation: dict[str, np.ndarray] = {}
        self._logs: Any = None
        self._has_ended = threading.Event()

    def ended(self, logs: Any) -> None:
        """Keep the logs of the step; on JAX Keras reports them in a thread, and may be late."""
        self._logs = logs
        self._has_ended.set()

    def logs(self) -> Any:
        """Return the logs of the step; none if another callback failed in Keras' thread."""
        self._has_ended.wait(_SECONDS)
        return self._logs or {}


@contextlib.contextmanager
def returning(model: keras.Model, logs: Any) -> Iterator[None]:
    """Have the next training step of Keras' `fit` take its batch, and return these logs untrained.

    Keras has no epoch without batches: `fit` in keras/src/backend/jax/trainer.py lacks `logs` then.
    """
    train = model.train_function

    def returned(*state_and_batches: Any) -> Any:
        model.train_function = train
        *state, batches = state_and_batches  # JAX has a state
        next(batches)
        return (logs, *state) if state else logs

    model.train_function = returned
    try:
        yield
    finally:
        model.train_function = train
