"""Stop training after a signal, before the same step in all processes."""

import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import keras

from kdpkit import errors
from kdpkit._internal import processes
from kdpkit.callbacks._resume import signals

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

    def __init__(self) -> None:
        self._held = signals.HeldSignals()
        self._forget()

    def _forget(self) -> None:
        self.signal: signal.Signals | None = None
        self._calls = 0
        self._next_question = self._calls_between = 1
        self._asked_at = time.monotonic()

    def begin(self) -> None:
        """Begin to watch for signals."""
        self._forget()
        if processes.count() == 1 or keras.backend.backend() != "jax":  # JAX handles SIGTERM itself
            self._held.hold()

    def request(self) -> None:
        """Do as if SIGTERM had arrived."""
        self._held.request()
        if processes.count() > 1 and keras.backend.backend() == "jax":
            signal.raise_signal(signal.SIGTERM)  # JAX makes it known to the other processes

    def end(self) -> None:
        """Leave signals to the program, also one that came after the last epoch."""
        self._held.release()
        if self._held.received and not self._held.is_requested:
            signal.raise_signal(self._held.received)

    def is_due(self, strategy: "tf.distribute.Strategy | None", *, asks_now: bool = False) -> bool:
        """Return whether to stop; every process must call this at the same points.

        Args:
            strategy: On TensorFlow, the strategy that spans the processes.
            asks_now: Whether to ask the others now in any case.
        """
        if self.signal is None:
            self._calls += 1
            if processes.count() == 1:
                self.signal = self._held.received
            elif keras.backend.backend() == "jax":
                self.signal = signal.SIGTERM if processes.reached_preemption() else None
            elif asks_now or self._calls >= self._next_question:
                self.signal = self._ask(strategy)
        return self.signal is not None

    def _ask(self, strategy: "tf.distribute.Strategy | None") -> signal.Signals | None:
        """Ask whether any process got a signal, and agree when to ask again."""
        now = time.monotonic()
        rate = self._calls_between / max(now - self._asked_at, 1e-6)
        own = [self._held.received or 0, int(rate * _SECONDS_BETWEEN_QUESTIONS)]
        of_all = processes.gathered(own, strategy)
        # At most twice as many, since the next steps may be slower.
        self._calls_between = max(1, min(int(of_all[0, 1]), 2 * self._calls_between))
        self._next_question = self._calls + self._calls_between
        self._asked_at = now
        received = [signal.Signals(int(number)) for number in of_all[:, 0] if number]
        return received[0] if received else None

    def leave(self, where: object) -> NoReturn:
        """End the program, whose state is saved."""
        by_ctrl_c = self.signal == signal.SIGINT
        by = "request_stop()" if self._held.is_requested else "SIGTERM"
        message = (
            f"Training was stopped by {'Ctrl-C' if by_ctrl_c else by}. Its state is in {where}, "
            "and the same program continues from there."
        )
        self._forget()
        if by_ctrl_c:
            self._held.release()
            raise KeyboardInterrupt(message)
        self._held.release_to_leave()
        sys.stderr.write(f"\n{message}\n")
        raise SystemExit(errors.STOPPED)
