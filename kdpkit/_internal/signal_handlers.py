"""Handlers of signals, for the length of a block."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals
) -> Iterator[None]:
    """Have a function called for signals in the block; outside of the main thread do nothing.

    A signal that is ignored stays so, and one that is handled outside of Python too.
    """
    former = {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.getsignal(number) for number in numbers}
        former = {n: h for n, h in former.items() if h not in (None, signal.SIG_IGN)}
    for number in former:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)
