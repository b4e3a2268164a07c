"""What several processes print at once, line by line, each with its name."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO


class Lines:
    r"""Splits what a process writes into lines.

    A progress bar, which begins its line again with `\r`, gives its last state:

    >>> lines = Lines()
    >>> lines.feed(b"one\n10%\r20%\r"), lines.feed(b"100%\ntwo"), lines.feed(b"")
    (['one'], ['100%'], ['two'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end within these bytes; no bytes are the end of the last line."""
        if not data and self._rest:
            data = b"\n"
        *lines, self._rest = re.split(rb"\r*\n", self._rest + data)
        states, _, begun = self._rest.rpartition(b"\r")
        if states:
            self._rest = _last_state(states) + b"\r" + begun
        return [_last_state(line).decode(errors="replace") for line in lines]


def _last_state(text: bytes) -> bytes:
    """Return what a bar showed last that is not blank."""
    states = text.split(b"\r")
    return next((state for state in reversed(states) if state.strip()), states[-1])


class Printer:
    """Writes lines of several processes to stdout and stderr, one at a time.

    Args:
        names: Of all who print; they are padded to one width.
        on_gone: Called when nobody reads the output any more.
    """

    def __init__(self, names: Iterable[str], *, on_gone: Callable[[], None]) -> None:
        self._width = max(map(len, names))
        self._on_gone = on_gone
        self._lock = threading.Lock()

    def line(self, name: str, text: str, to: str) -> None:
        """Write one line of one process to "stdout" or "stderr"."""
        stream = getattr(sys, to)
        with self._lock:
            try:
                stream.write(f"{name:<{self._width}} | {text}\n")
                stream.flush()
            except BrokenPipeError:
                discard(stream)
                self._on_gone()


def discard(stream: TextIO) -> None:
    """Send what is left in the stream nowhere, where Python would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
