"""SIGTERM and Ctrl-C, held back until training is where it can be stopped."""

import os
import signal
import threading
from typing import Any

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class HeldSignals:
    """Notes the first SIGTERM or Ctrl-C; the next one does at once what it always does.

    Attributes:
        received: The one that came while they were held.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        """Begin to hold them back; Python lets only the main thread do so."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NAMES:
            former = signal.getsignal(number)
            # A handler that is not Python's could not be put back; a shell's background job is
            # not to hear of Ctrl-C.
            if former is not None and (number, former) != (signal.SIGINT, signal.SIG_IGN):
                self._former[number] = former
                signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number)
        for held, former in self._former.items():
            signal.signal(held, signal.default_int_handler if held == signal.SIGINT else former)
        # Not `print`: Keras may be writing its progress to the same buffer at this moment.
        said = f"\n{_NAMES[self.received]}: training ends with this step, and its state is saved.\n"
        os.write(2, said.encode())

    def release(self) -> None:
        """Put back what handled them before."""
        while self._former:
            signal.signal(*self._former.popitem())
