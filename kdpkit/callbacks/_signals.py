"""SIGTERM and Ctrl-C, held back until training is where it can be stopped."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class HeldSignals:
    """Notes the first SIGTERM or Ctrl-C; the next one does at once what it always does.

    Keras tells no callback that training has failed. Hence a signal is noted only while the
    function that trains is running; where it has ended by an error, a signal does what it always
    does.

    Attributes:
        received: The one that came while they were held.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}
        # Not the frame itself, which would keep alive all that the function holds.
        self._training: tuple[int, object] | None = None

    def hold(self) -> None:
        """Begin to hold them back; Python lets only the main thread do so."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        self.release()  # what an earlier training left that ended by an error
        self._training = _identity(_trainer(sys._getframe(1)))
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that is not Python's could not be put back; a shell's background job is
            # not to hear of Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former
                signal.signal(number, self._handle)

    def release(self) -> None:
        """Put back what handled them before, where nobody has put something else there since."""
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while frame and _identity(frame) != self._training:
            frame = frame.f_back
        if frame is None:
            self.release()
            signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        for held, former in self._former.items():
            signal.signal(held, signal.default_int_handler if held == signal.SIGINT else former)
        # Not `print`: Keras may be writing its progress to the same buffer at this moment.
        said = f"\n{_NAMES[self.received]}: training ends with this step, and its state is saved.\n"
        os.write(2, said.encode())


def _trainer(frame: FrameType) -> FrameType:
    """Give the function that trains: the first caller that only passes `on_train_begin` on."""
    while frame.f_code.co_name == "on_train_begin" and frame.f_back:
        frame = frame.f_back
    return frame


def _identity(frame: FrameType) -> tuple[int, object]:
    return id(frame), frame.f_code
