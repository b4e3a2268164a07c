"""Defer SIGTERM and Ctrl-C until training can be stopped."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class HeldSignals:
    """Defers the first SIGTERM or Ctrl-C; later, Ctrl-C acts at once and SIGTERM is ignored.

    Some schedulers and launchers send SIGTERM twice; the second one must not interrupt what the
    first one has started.

    Keras has no hook for failed training. So a signal is only deferred while the call that trains
    is running; after an error in it, signals act as usual.

    Attributes:
        received: The signal that arrived while signals were deferred.
        is_requested: Whether `request` was called instead.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_requested = False
        self._former: dict[signal.Signals, tuple[Handler, Handler]] = {}  # with the one set since
        self._training: tuple[int, object] = (0, None)

    def hold(self) -> None:
        """Start deferring signals; Python only allows this in the main thread."""
        self.received, self.is_requested = None, False
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "This thread is not the main one, so SIGTERM and Ctrl-C end the program without "
                "saving the state. To stop with it saved, call `resume.request_stop()`.",
                stacklevel=4,
            )
            return
        self.release()  # left by an earlier training that failed
        frame = sys._getframe(2)
        while frame.f_code.co_name == "on_train_begin" and frame.f_back:
            frame = frame.f_back
        self._training = _identity(frame)
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that was not set from Python could not be restored; background jobs of a
            # shell must keep ignoring Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former, self._handle
                signal.signal(number, self._handle)

    def request(self) -> None:
        """Do as if SIGTERM had arrived."""
        self.received, self.is_requested = self.received or signal.SIGTERM, True

    def release(self) -> None:
        """Restore the previous handlers, unless they were replaced meanwhile."""
        while self._former:
            number, (former, ours) = self._former.popitem()
            if signal.getsignal(number) == ours:
                signal.signal(number, former)

    def release_to_leave(self) -> None:
        """Restore the handler of Ctrl-C; SIGTERM is still ignored."""
        self.release()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        came_from = frame
        while came_from and _identity(came_from) != self._training:
            came_from = came_from.f_back
        if came_from is None:  # training has failed
            self._do_as_before(signal.Signals(number), frame)
            return
        self.received = signal.Signals(number)
        for held, (former, _) in self._former.items():
            later = signal.default_int_handler if held == signal.SIGINT else signal.SIG_IGN
            self._former[held] = former, later
            signal.signal(held, later)
        # Not `print`: Keras may be writing its progress to the same buffer.
        name = _NAMES[self.received]
        os.write(2, f"\n{name}: training ends with this step, and its state is saved.\n".encode())

    def _do_as_before(self, number: signal.Signals, frame: FrameType | None) -> None:
        former, _ = self._former.get(number, (signal.SIG_DFL, None))
        self.release()
        if callable(former):  # also if a later handler has called this one
            former(number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(number, former)
            signal.raise_signal(number)


def _identity(frame: FrameType) -> tuple[int, object]:
    """Return what tells a call from others; the frame itself would keep its variables alive."""
    return id(frame), frame.f_code
