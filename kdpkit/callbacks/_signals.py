"""SIGTERM and Ctrl-C, held back until training is where it can be stopped."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from kdpkit.callbacks import _calls

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class HeldSignals:
    """Notes the first SIGTERM or Ctrl-C; after that Ctrl-C acts at once, and SIGTERM no more.

    Schedulers and launchers send SIGTERM, and some send it twice; none must cut short what the
    first one has begun.

    Keras has no hook for training that failed. Hence a signal is noted only while the function that
    trains is running; where it has ended by an error, a signal does what it always does.

    Attributes:
        received: The one that came while they were held.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Handler] = {}
        self._set: dict[signal.Signals, Handler] = {}
        self._training: _calls.Call = (0, None)

    def hold(self) -> None:
        """Begin to hold them back; Python lets only the main thread do so."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        self.release()  # what an earlier training left that ended by an error
        self._training = _calls.training_call(sys._getframe(1))
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that is not Python's could not be put back; a shell's background job is
            # not to hear of Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former
                self._put(number, self._handle)

    def release(self) -> None:
        """Put back what handled them before, where nobody has put something else there since."""
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._set.pop(number):
                signal.signal(number, former)

    def release_to_leave(self) -> None:
        """Put back what handled Ctrl-C; SIGTERM is no news any more."""
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
        # Not `print`: Keras may be writing its progress to the same buffer at this moment.
        message = (
            f"\n{_NAMES[self.received]}: training ends with this step, and its state is saved.\n"
        )
        os.write(2, message.encode())

    def _do_as_before(self, number: signal.Signals, frame: FrameType | None) -> None:
        former = self._former.get(number, signal.SIG_DFL)
        self.release()
        if callable(former):  # also where another handler stands now, which has called this one
            former(number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(number, former)
            signal.raise_signal(number)
