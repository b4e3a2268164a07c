"""Stop training after a signal before the same step in all processes."""

import signal
import time
from typing import TYPE_CHECKING

import keras

from kdpkit._internal import processes
from kdpkit.callbacks import _signals

if TYPE_CHECKING:
    import tensorflow as tf

_SECONDS_BETWEEN_QUESTIONS = 1.0


class AgreedStop:
    """Decides whether training stops now, because any process got a signal.

    On JAX the coordination service decides. On TensorFlow the processes ask each other before the
    same steps. That is a small sum over the network, so they ask about once per second of the first
    process' clock, and at the end of an epoch.

    Attributes:
        signal: The signal for which all stop, once they have agreed.
    """

    def __init__(self, signals: _signals.HeldSignals) -> None:
        self._signals = signals
        self.begin()

    def begin(self) -> None:
        """Reset what an earlier training agreed on."""
        self.signal: signal.Signals | None = None
        self._calls = 0
        self._next_question = 1
        self._calls_between = 1
        self._asked_at = time.monotonic()

    def is_due(self, strategy: "tf.distribute.Strategy | None", *, asks_now: bool = False) -> bool:
        """Return whether to stop; every process must call this at the same points.

        Args:
            strategy: On TensorFlow, the strategy that spans the processes.
            asks_now: Whether to ask the others now in any case.
        """
        if self.signal is None:
            self._calls += 1
            self.signal = self._agreed(strategy, asks_now)
        return self.signal is not None

    def _agreed(
        self, strategy: "tf.distribute.Strategy | None", asks_now: bool
    ) -> signal.Signals | None:
        if processes.count() == 1:
            return self._signals.received
        if keras.backend.backend() == "jax":
            return signal.SIGTERM if processes.reached_preemption() else None
        is_time = asks_now or self._calls >= self._next_question
        return self._ask(strategy) if is_time else None

    def _ask(self, strategy: "tf.distribute.Strategy | None") -> signal.Signals | None:
        """Ask whether any process got a signal, and agree when to ask again."""
        now = time.monotonic()
        rate = self._calls_between / max(now - self._asked_at, 1e-6)
        own = [self._signals.received or 0, int(rate * _SECONDS_BETWEEN_QUESTIONS)]
        of_all = processes.gathered(own, strategy)
        # At most twice as many, since the next steps may be slower.
        self._calls_between = max(1, min(int(of_all[0, 1]), 2 * self._calls_between))
        self._next_question = self._calls + self._calls_between
        self._asked_at = now
        received = [signal.Signals(int(number)) for number in of_all[:, 0] if number]
        return received[0] if received else None
