"""Defer SIGTERM and Ctrl-C until training can be stopped."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from kdpkit.callbacks import _calls

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class HeldSignals:
    """Defers the first SIGTERM or Ctrl-C; later, Ctrl-C acts at once and SIGTERM is ignored.

    Some schedulers and launchers send SIGTERM twice; the second one must not interrupt what the
    first one has started.

    Keras has no hook for failed training. So a signal is only deferred while the training function
    is running; after an error in it, signals act as usual.

    Attributes:
        received: The signal that arrived while signals were deferred.
        is_requested: Whether `request` was called instead.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_requested = False
        self._former: dict[signal.Signals, Handler] = {}
        self._set: dict[signal.Signals, Handler] = {}
        self._training: _calls.Call = (0, None)

    def hold(self) -> None:
        """Start deferring signals; Python only allows this in the main thread."""
        self.received, self.is_requested = None, False
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "This thread is not the main one, so SIGTERM and Ctrl-C end the program without "
                "saving the state. To stop with it saved, call `resume.request_stop()`.",
                stacklevel=3,
            )
            return
        self.release()  # left by an earlier training that failed
        self._training = _calls.training_call(sys._getframe(1))
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that was not set from Python could not be restored; background jobs of a
            # shell must keep ignoring Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former
                self._put(number, self._handle)

    def request(self) -> None:
        """Do as if SIGTERM had arrived."""
        self.received, self.is_requested = self.received or signal.SIGTERM, True

    def release(self) -> None:
        """Restore the previous handlers, unless they were replaced meanwhile."""
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._set.pop(number):
                signal.signal(number, former)

    def release_to_leave(self) -> None:
        """Restore the handler of Ctrl-C; SIGTERM is still ignored."""
        self.release()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _put(self, number: signal.Signals, handler: Handler) -> None:
        self._set[number] = handler
        signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not _calls.is_under_way(self._training, frame):
            self._do_as_before(signal.Signals(number), frame)
            return
        self.received = signal.Signals(number)
        for held in self._former:
            self._put(held, signal.default_int_handler if held == signal.SIGINT else signal.SIG_IGN)
        # Not `print`: Keras may be writing its progress to the same buffer.
        message = (
            f"\n{_NAMES[self.received]}: training ends with this step, and its state is saved.\n"
        )
        os.write(2, message.encode())

    def _do_as_before(self, number: signal.Signals, frame: FrameType | None) -> None:
        former = self._former.get(number, signal.SIG_DFL)
        self.release()
        if callable(former):  # also if a later handler has called this one
            former(number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(number, former)
            signal.raise_signal(number)
