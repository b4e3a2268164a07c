"""A program of kdpkit's own in a process of its own, under a time limit, with nothing left behind.

TensorFlow and JAX may wait for ever, or end the process that loads them: so what is asked of them
is asked of another one.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdpkit import _children, cluster
from kdpkit.diagnostics import _private

_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_KERNEL_SECONDS = 10.0  # for a process that was killed to be gone


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote; its exit code is None where it took too long."""

    exit_code: int | None
    seconds: float
    stdout: str
    stderr: str

    def said(self, sign: str) -> list[dict[str, Any]]:
        """Give what its lines that hold a sign say behind it, as JSON."""
        lines = self.stdout.splitlines()
        return [json.loads(line.partition(sign)[2]) for line in lines if sign in line]

    def how(self) -> str:
        """Say how it ended, and what it said last."""
        code = self.exit_code or 0
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        last = f": {_private.without(lines[-1]).rstrip('.')}" if lines else ""
        if code > 128 and code - 128 in set(signal.Signals):
            return f"It was ended by {signal.Signals(code - 128).name}{last}"
        return f"It ended with exit code {code}{last}"


class Program:
    """A Python module that runs, with all that it starts."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], mark: str) -> None:
        self._mark = mark
        self._has_ended = threading.Event()
        self._written: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self.child = _children.Child(
            [sys.executable, "-m", *words],
            _environment(variables),
            mark=mark,
            on_bytes=lambda data, stream: self._written[stream].append(data),
            on_end=self._has_ended.set,
        )

    def wait(self, timeout_seconds: float) -> Ended:
        """Wait until it has ended; after the limit end it."""
        left = self.child.started_at + timeout_seconds - time.monotonic()
        is_in_time = self._has_ended.wait(max(0.0, left))
        seconds = (self.child.ended_at or time.monotonic()) - self.child.started_at
        if not is_in_time:
            self.end()
        stdout, stderr = (b"".join(parts).decode(errors="replace") for parts in self._both())
        return Ended(self.child.exit_code if is_in_time else None, seconds, stdout, stderr)

    def end(self) -> None:
        """End what is left of it."""
        self.child.send(signal.SIGTERM)
        _children.end_marked(
            self._mark, grace_seconds=_GRACE_SECONDS, told_groups={self.child.group}
        )
        self._has_ended.wait(_GRACE_SECONDS)
        self.child.send(signal.SIGKILL)  # where there is no /proc
        self._has_ended.wait(_KERNEL_SECONDS)

    def _both(self) -> Iterator[list[bytes]]:
        yield [*self._written["stdout"]]
        yield [*self._written["stderr"]]


@contextlib.contextmanager
def started(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[Program]:
    """Run a module of kdpkit with these variables, in no cluster, and end it with the block.

    However this process ends, nothing of the program is left: also when a second Ctrl-C comes while
    it is ended, the guard sees to it.

    Args:
        words: The module's name, and its arguments.
        variables: What is set for it beside the variables that this process has.
    """
    mark = f"{uuid.uuid4().hex};"
    with _children.Guard(mark, grace_seconds=_GRACE_SECONDS) as guard:
        program = Program(words, variables, mark)
        guard.watch(program.child)
        try:
            yield program
        finally:
            program.end()
            guard.all_ended()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in cluster.VARIABLES}
    return kept | {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"} | dict(variables)
