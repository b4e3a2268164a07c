"""What several processes print at once, line by line, each under its name."""

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

_REDRAWN_SECONDS = 5.0  # between two lines of one progress bar
_LONGEST = 1 << 16  # bytes that are kept for a line without an end


class Lines:
    r"""Cuts what a process writes into lines.

    A progress bar, which begins its line anew with `\r`, gives a line every few seconds and its
    last state:

    >>> lines = Lines()
    >>> lines.feed(b"one\n10%\r20%\r", now=0.0), lines.feed(b"40%\r50%\r", now=9.0)
    (['one'], ['50%'])
    >>> lines.feed(b"60%\r100%\ntwo", now=10.0), lines.close()
    (['100%'], ['two'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn = b""  # the state of a bar that was given last
        self._drawn_at = math.inf  # or begun at; infinite without a bar

    def feed(self, data: bytes, now: float) -> list[str]:
        """Give the lines that are whole with these bytes, which came at `now` seconds."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        lines = [line for text in ended for line in self._end(text)]
        *drawings, begun = self._rest.split(b"\r")
        last = _last(drawings)
        if last:
            self._rest = last + b"\r" + begun
            self._drawn_at = min(self._drawn_at, now)
            if last != self._drawn and now - self._drawn_at >= _REDRAWN_SECONDS:
                self._drawn, self._drawn_at = last, now
                lines.append(last)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> list[str]:
        """Give what is left."""
        rest, self._rest = self._rest, b""
        return [line.decode(errors="replace") for line in (self._end(rest) if rest else ())]

    def _end(self, text: bytes) -> Iterable[bytes]:
        drawings = text.split(b"\r")
        last = _last(drawings)
        is_given = last and last == self._drawn
        self._drawn, self._drawn_at = b"", math.inf
        return () if is_given else (last,)


def _last(drawings: list[bytes]) -> bytes:
    return next((drawing for drawing in reversed(drawings) if drawing.strip()), b"")


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

    def line(self, name: str, text: str, *, to: str) -> None:
        """Write one line of one process."""
        with self._lock:
            stream = self._streams.get(to)
            if stream is None:
                return
            whole = f"{name:<{self._width}} | {text}\n"
            encoding = getattr(stream, "encoding", None) or "utf-8"
            try:
                stream.write(whole.encode(encoding, "replace").decode(encoding))
                stream.flush()
            except BrokenPipeError:
                del self._streams[to]
                _discard(stream)
                self._on_gone()


def _discard(stream: TextIO) -> None:
    """Let what is left in the stream go nowhere, where Python would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
