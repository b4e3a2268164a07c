"""Child processes that do not outlive the process that started them, however that one ends.

Each child leads a process group, so that signals reach what it starts, and has a mark in its
environment, by which processes that left the group are found in /proc. A guard, which is this file
run as a program, waits for the end of a pipe that only the launcher holds: however the launcher
ends, the guard then ends all processes with the mark.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, cast

MARK = "KDPKIT_LAUNCH"  # the variable with the marks of nested launchers, the outermost first

_DRAIN_SECONDS = 2.0  # for reading the rest of the output of a process that has ended
_PROC = Path("/proc")
_ALL_ENDED = "all ended\n"


class Child:
    """A process, what it writes, and how it ended.

    Args:
        command: Its words.
        environment: All its variables.
        mark: Text by which it is found; it ends with ";".
        on_bytes: Called in a thread with bytes that it wrote and "stdout" or "stderr"; at the end
            of each stream with no bytes.
        on_end: Called in a thread when it has ended and its output is read.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        mark: str,
        on_bytes: Callable[[bytes, str], None],
        on_end: Callable[[], None],
    ) -> None:
        self.ended_at: float | None = None
        self._process = subprocess.Popen(  # noqa: S603 the user's own command
            command,
            env={**environment, MARK: environment.get(MARK, "") + mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._watch, args=(on_bytes, on_end), daemon=True).start()

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports: 128 + the number of a signal that ended it."""
        code = self._process.returncode
        code = -signal.SIGKILL if code is None else code  # the kernel is still ending it
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send a signal to it and to all of its group, unless it has ended."""
        if self._process.returncode is None:
            group = -self._process.pid
            _signal([group], number)
            _signal([group], signal.SIGCONT)  # a stopped process handles no signal before this

    def _watch(self, on_bytes: Callable[[bytes, str], None], on_end: Callable[[], None]) -> None:
        def read(stream: IO[bytes], name: str) -> None:
            with stream:
                while data := os.read(stream.fileno(), 1 << 16):
                    on_bytes(data, name)
            on_bytes(b"", name)

        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        readers = [
            threading.Thread(target=read, args=(stream, name), daemon=True)
            for name, stream in streams.items()
        ]
        for reader in readers:
            reader.start()
        self._process.wait()
        self.ended_at = time.monotonic()
        for reader in readers:  # its own child processes may hold the pipes longer
            reader.join(max(0.0, self.ended_at + _DRAIN_SECONDS - time.monotonic()))
        on_end()


class Guard:
    """A context that ends all processes with a mark, even if this process is killed in it.

    It does nothing once `all_ended` was called. Leaving the block waits for the guard.
    """

    def __init__(self, mark: str, *, grace_seconds: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603 this file
            [sys.executable, "-I", "-S", __file__, mark, str(grace_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def all_ended(self) -> None:
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):
            pipe.write(_ALL_ENDED.encode())
            pipe.flush()


def marked(mark: str) -> list[int]:
    """Return the numbers of the other processes with a mark."""
    numbers = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                if mark.encode() in (entry / "environ").read_bytes():
                    numbers.append(int(entry.name))
    return numbers


def end_marked(mark: str, *, grace_seconds: float) -> None:
    """End all processes with a mark: by SIGTERM, and by SIGKILL after the grace period."""
    signalled: set[int] = set()
    deadline = time.monotonic() + grace_seconds
    while (left := set(marked(mark))) and time.monotonic() < deadline:
        _signal(left - signalled, signal.SIGTERM)
        signalled |= left
        time.sleep(0.05)
    # The time counts from here, since this process may have been stopped meanwhile.
    deadline = time.monotonic() + _DRAIN_SECONDS
    while left := set(marked(mark)):
        _signal(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            break  # only the kernel can end them now
        time.sleep(0.05)


def _signal(processes: Iterable[int], number: int) -> None:
    """Send a signal to processes, or to groups, whose numbers are negative."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _guard(mark: str, grace_seconds: float) -> None:
    """Wait for the launcher's end, then end what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.readline() == _ALL_ENDED:
        return
    end_marked(mark, grace_seconds=grace_seconds)
    time.sleep(0.5)  # a process that was just being started had no mark yet
    end_marked(mark, grace_seconds=0)


if __name__ == "__main__":
    _guard(sys.argv[1], float(sys.argv[2]))
