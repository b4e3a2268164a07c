"""Stop training after SIGTERM, Ctrl-C or a request, before the same step in all processes."""

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeAlias

import keras

from kdpkit import errors
from kdpkit._internal import processes

if TYPE_CHECKING:
    import tensorflow as tf

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
_SECONDS_BETWEEN_QUESTIONS = 1.0


class AgreedStop:
    """Decides whether training stops now, because any process got a signal or a request.

    The first SIGTERM or Ctrl-C is deferred; later, Ctrl-C acts at once and SIGTERM is ignored, as
    some schedulers send it twice, until the program ends or trains again. Keras has no hook for
    failed training, so signals are only deferred while the call that trains is running.

    On JAX the coordination service decides for several processes. On TensorFlow they ask each other
    before the same steps. That is a small sum over the network, so they ask about once per second
    of the first process' clock, and at the end of an epoch.

    Attributes:
        signal: The signal for which all stop, once they have agreed.
    """

    _before_ignoring: ClassVar[list[Handler]] = []  # the program's handling of SIGTERM

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Handler] = {}
        self._training: tuple[int, object] = (0, None)
        self._forget()

    def _forget(self) -> None:
        self.signal: signal.Signals | None = None
        self._received: signal.Signals | None = None
        self._is_requested = False
        self._calls = 0
        self._next_question = self._calls_between = 1
        self._asked_at = time.monotonic()

    def begin(self) -> None:
        """Begin to watch for signals; Python only allows this in the main thread."""
        self._release()  # left by an earlier training that failed
        self._forget()
        if processes.count() > 1 and keras.backend.backend() == "jax":
            return  # JAX handles SIGTERM itself
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "This thread is not the main one, so SIGTERM and Ctrl-C end the program without "
                "saving the state. To stop with it saved, call `resume.request_stop()`.",
                stacklevel=3,
            )
            return
        former = self._before_ignoring.pop() if self._before_ignoring else None
        if former is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            signal.signal(signal.SIGTERM, former)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "on_train_begin" and frame.f_back:
            frame = frame.f_back
        self._training = _identity(frame)
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that was not set from Python could not be restored; background jobs of a
            # shell must keep ignoring Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former
                signal.signal(number, self._handle)

    def request(self) -> None:
        """Do as if SIGTERM had arrived."""
        if self._received is None:
            self._received, self._is_requested = signal.SIGTERM, True
        if processes.count() > 1 and keras.backend.backend() == "jax":
            signal.raise_signal(signal.SIGTERM)  # JAX makes it known to the other processes

    def end(self) -> None:
        """Leave signals to the program, also one that came after the last epoch."""
        self._release()
        if self._received and not self._is_requested:
            signal.raise_signal(self._received)

    def is_due(self, strategy: "tf.distribute.Strategy | None", *, asks_now: bool = False) -> bool:
        """Return whether to stop; every process must call this at the same points.

        Args:
            strategy: On TensorFlow, the strategy that spans the processes.
            asks_now: Whether to ask the others now in any case.
        """
        if self.signal is None:
            self._calls += 1
            if processes.count() == 1:
                self.signal = self._received
            elif keras.backend.backend() == "jax":
                self.signal = signal.SIGTERM if processes.reached_preemption() else None
            elif asks_now or self._calls >= self._next_question:
                self.signal = self._ask(strategy)
        return self.signal is not None

    def _ask(self, strategy: "tf.distribute.Strategy | None") -> signal.Signals | None:
        """Ask whether any process got a signal, and agree when to ask again."""
        now = time.monotonic()
        rate = self._calls_between / max(now - self._asked_at, 1e-6)
        own = [self._received or 0, int(rate * _SECONDS_BETWEEN_QUESTIONS)]
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
        by = "request_stop()" if self._is_requested else "SIGTERM"
        ignores = not (by_ctrl_c or self._is_requested)
        message = (
            f"Training was stopped by {'Ctrl-C' if by_ctrl_c else by}. Its state is in {where}, "
            "and the same program continues from there."
        )
        self._forget()
        self._release()
        if by_ctrl_c:
            raise KeyboardInterrupt(message)
        if ignores and threading.current_thread() is threading.main_thread():
            self._before_ignoring.append(signal.signal(signal.SIGTERM, signal.SIG_IGN))
        sys.stderr.write(f"\n{message}\n")
        raise SystemExit(errors.STOPPED)

    def _release(self) -> None:
        while self._former:
            signal.signal(*self._former.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while frame and _identity(frame) != self._training:
            frame = frame.f_back
        if frame is None:  # training has failed
            self._release()
            signal.raise_signal(number)
            return
        self._received, self._is_requested = signal.Signals(number), False
        for held in self._former:
            is_ctrl_c = held == signal.SIGINT
            signal.signal(held, signal.default_int_handler if is_ctrl_c else signal.SIG_IGN)
        # Not `print`: Keras may be writing its progress to the same buffer.
        name = _NAMES[self._received]
        text = f"\n{name}: the state is saved before the next step, or after the validation.\n"
        os.write(2, text.encode())


def _identity(frame: FrameType) -> tuple[int, object]:
    """Return what tells a call from others; the frame itself would keep its variables alive."""
    return id(frame), frame.f_code
