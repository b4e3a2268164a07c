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
_SECONDS_BETWEEN_EXCHANGES = 1.0


class AgreedStop:
    """Decides whether training stops now, because any process got a signal or a request.

    The first SIGTERM or Ctrl-C is deferred. Later ones, until the program ends or trains again, are
    not: Ctrl-C acts at once, and SIGTERM is ignored, because some schedulers send it twice. Keras
    has no hook for failed training, so signals are only deferred while the call that trains runs.

    On JAX the coordination service decides for several processes. On TensorFlow they exchange what
    they got before the same steps. That is a small sum over the network, so they do it about once
    per second of the first process' clock, and at the end of an epoch.
    """

    _handlers_before_ignoring: ClassVar[list[Handler]] = []  # the program's, of SIGTERM

    def __init__(self) -> None:
        self._program_handlers: dict[signal.Signals, Handler] = {}
        self._training_call: tuple[int, object] = (0, None)
        self._reset()

    def _reset(self) -> None:
        self.signal: signal.Signals | None = None  # for which all processes have agreed to stop
        self._received: signal.Signals | None = None
        self._is_requested = False
        self._calls = 0
        self._next_exchange = self._calls_between = 1
        self._exchanged_at = time.monotonic()

    def begin(self) -> None:
        """Watch for signals; Python only allows this in the main thread."""
        self._restore_handlers()  # An earlier training may have failed, and left ours.
        self._reset()
        if processes.count() > 1 and keras.backend.backend() == "jax":
            return  # JAX handles SIGTERM itself.
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "This thread is not the main one, so SIGTERM and Ctrl-C end the program without "
                "saving the state. To stop with it saved, call `resume.request_stop()`.",
                stacklevel=3,
            )
            return
        before = self._handlers_before_ignoring.pop() if self._handlers_before_ignoring else None
        if before is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "on_train_begin" and frame.f_back:
            frame = frame.f_back
        self._training_call = _identity(frame)
        for number in _NAMES:
            handler = signal.getsignal(number)
            # A handler that was not set from Python (None) could not be restored. A shell's
            # background jobs ignore Ctrl-C, and must continue to do so.
            if handler is not None and (number, handler) != (signal.SIGINT, signal.SIG_IGN):
                self._program_handlers[number] = handler
                signal.signal(number, self._handle)

    def request(self) -> None:
        if self._received is None:
            self._received, self._is_requested = signal.SIGTERM, True
        if processes.count() > 1 and keras.backend.backend() == "jax":
            signal.raise_signal(signal.SIGTERM)  # JAX reports it to the other processes.

    def end(self) -> None:
        """Return signals to the program, also one that came after the last epoch."""
        self._restore_handlers()
        if self._received and not self._is_requested:
            signal.raise_signal(self._received)

    def is_due(self, strategy: "tf.distribute.Strategy | None", *, at_once: bool = False) -> bool:
        """Return whether to stop; every process must call this at the same points.

        On TensorFlow the strategy spans the processes. `at_once` exchanges signals in any case.
        """
        if self.signal is None:
            self._calls += 1
            if processes.count() == 1:
                self.signal = self._received
            elif keras.backend.backend() == "jax":
                self.signal = signal.SIGTERM if processes.reached_preemption() else None
            elif at_once or self._calls >= self._next_exchange:
                self.signal = self._exchange(strategy)
        return self.signal is not None

    def _exchange(self, strategy: "tf.distribute.Strategy | None") -> signal.Signals | None:
        """Return a signal that any process got, and agree when to exchange them again."""
        now = time.monotonic()
        calls_per_second = self._calls_between / max(now - self._exchanged_at, 1e-6)
        numbers = [self._received or 0, int(calls_per_second * _SECONDS_BETWEEN_EXCHANGES)]
        by_process = processes.gathered(numbers, strategy)
        # At most twice as many as before, because the next steps may be slower.
        self._calls_between = max(1, min(int(by_process[0, 1]), 2 * self._calls_between))
        self._next_exchange = self._calls + self._calls_between
        self._exchanged_at = now
        received = [signal.Signals(int(number)) for number in by_process[:, 0] if number]
        return received[0] if received else None

    def leave(self, outcome: str) -> NoReturn:
        """End the program: with exit code 42, or after Ctrl-C by a `KeyboardInterrupt`."""
        is_ctrl_c, is_requested = self.signal == signal.SIGINT, self._is_requested
        cause = "Ctrl-C" if is_ctrl_c else "request_stop()" if is_requested else "SIGTERM"
        message = f"Training was stopped by {cause}. {outcome}"
        self._reset()
        self._restore_handlers()
        sys.stderr.write("\n")  # The cursor is behind Keras' progress bar.
        if is_ctrl_c:
            raise KeyboardInterrupt(message)
        if not is_requested and threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._handlers_before_ignoring.append(former)
        sys.stderr.write(f"{message}\n")
        raise SystemExit(errors.STOPPED)

    def _restore_handlers(self) -> None:
        while self._program_handlers:
            signal.signal(*self._program_handlers.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while frame and _identity(frame) != self._training_call:
            frame = frame.f_back
        if frame is None:  # Training has failed.
            self._restore_handlers()
            signal.raise_signal(number)
            return
        self._received, self._is_requested = signal.Signals(number), False
        for deferred in self._program_handlers:
            is_ctrl_c = deferred == signal.SIGINT
            signal.signal(deferred, signal.default_int_handler if is_ctrl_c else signal.SIG_IGN)
        # `print` could fail here: Keras may be writing its progress to the same buffer.
        name = _NAMES[self._received]
        text = f"\n{name}: the state is saved before the next step, or after the validation.\n"
        os.write(2, text.encode())


def _identity(frame: FrameType) -> tuple[int, object]:
    """Return what identifies a call. The frame itself would keep the call's variables alive."""
    return id(frame), frame.f_code
