"""What several processes print at once, line by line, each with its name."""

import contextlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

_REDRAWN_SECONDS = 5.0  # between two lines of one progress bar
_LONGEST = 1 << 16  # bytes that are kept for a line without an end


class Lines:
    r"""Splits what a process writes into lines.

    A progress bar, which begins its line again with `\r`, gives a line every few seconds and its
    last state:

    >>> lines = Lines()
    >>> lines.feed(b"one\n10%\r20%\r", now=0.0), lines.feed(b"40%\r50%\r", now=9.0)
    (['one'], ['50%'])
    >>> lines.feed(b"60%\r100%\ntwo", now=10.0), lines.close()
    (['100%'], ['two'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = math.inf  # a state of the current bar; infinite without one

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that end within these bytes, which came at `now` seconds."""
        *ended, self._rest = re.split(rb"\r*\n", self._rest + data)
        lines = [_last_state(text) for text in ended]
        if ended:
            self._shown_at = math.inf
        states, _, begun = self._rest.rpartition(b"\r")
        if states:
            state = _last_state(states)
            self._rest = state + b"\r" + begun
            self._shown_at = min(self._shown_at, now)
            if now - self._shown_at >= _REDRAWN_SECONDS:
                self._shown_at = now
                lines.append(state)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> list[str]:
        """Return what is left."""
        return self.feed(b"\n", 0.0) if self._rest else []


def _last_state(text: bytes) -> bytes:
    """Return what a bar showed last that is not blank."""
    states = text.split(b"\r")
    return next((state for state in reversed(states) if state.strip()), states[-1])


class Printer:
    """Writes lines of several processes to stdout and stderr, one at a time.

    Args:
        names: Of all who print; they are padded to one width.
        on_gone: Called once when nobody reads the output any more.
        stdout: The stream for what processes write to theirs; None is `sys.stdout`.
    """

    def __init__(
        self, names: Iterable[str], *, on_gone: Callable[[], None], stdout: TextIO | None = None
    ) -> None:
        self._width = max(map(len, names))
        self._on_gone = on_gone
        self._streams = {"stdout": stdout or sys.stdout, "stderr": sys.stderr}
        self._lock = threading.Lock()

    def line(self, name: str, text: str, to: str) -> None:
        """Write one line of one process."""
        with self._lock:
            stream = self._streams.get(to)
            if stream is None:
                return
            line = f"{name:<{self._width}} | {text}\n"
            encoding = getattr(stream, "encoding", None) or "utf-8"
            try:
                stream.write(line.encode(encoding, "replace").decode(encoding))
                stream.flush()
            except BrokenPipeError:
                del self._streams[to]
                discard(stream)
                self._on_gone()


def discard(stream: TextIO) -> None:
    """Send what is left in the stream nowhere, where Python would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
