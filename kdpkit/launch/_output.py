"""The output of several processes, line by line, each line with the name of its process."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

_BAR_SECONDS = 5.0  # between two lines of one progress bar


class Lines:
    r"""Splits the output of a process into lines.

    Of a progress bar, which begins its line again with `\r`, it returns a line every few seconds
    and the last one:

    >>> lines = Lines(now=0.0)
    >>> lines.feed(b"one\n10%\r20%\r", now=1.0), lines.feed(b"40%\r50%\r", now=9.0)
    (['one'], ['50%'])
    >>> lines.feed(b"60%\r100%\ntwo", now=10.0), lines.feed(b"", now=10.0)
    (['100%'], ['two'])
    """

    def __init__(self, now: float) -> None:
        self._rest = b""
        self._shown_at = now

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that end within these bytes, which came at `now` seconds.

        No bytes mean the end of the output, where an unfinished line counts as a line.
        """
        if not data and self._rest:
            data = b"\n"
        *lines, self._rest = re.split(rb"\r*\n", self._rest + data)
        states, _, unfinished = self._rest.rpartition(b"\r")
        if states:
            self._rest = _last_state(states) + b"\r" + unfinished
        if states and now - self._shown_at >= _BAR_SECONDS:
            lines.append(states)
        if lines:
            self._shown_at = now
        return [_last_state(line).decode(errors="replace") for line in lines]


def _last_state(text: bytes) -> bytes:
    """Return the last state of a progress bar that is not blank."""
    states = text.split(b"\r")
    return next((state for state in reversed(states) if state.strip()), states[-1])


class Printer:
    """Writes lines of several processes, by their names, to stdout and stderr.

    `on_gone` is called in a thread if the reader of a pipe is gone, or the disk of a file is full.
    """

    def __init__(self, names: Iterable[str], *, on_gone: Callable[[OSError], None]) -> None:
        self._width = max(map(len, names))
        self._on_gone = on_gone
        self._lock = threading.Lock()

    def line(self, name: str, text: str, to: str) -> None:
        stream = getattr(sys, to)
        with self._lock:
            try:
                stream.write(f"{name:<{self._width}} | {text}\n")
                stream.flush()
            except OSError as error:
                discard(stream)
                self._on_gone(error)


def discard(stream: TextIO) -> None:
    """Discard what is left in a stream, about which Python would print an error at its exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
