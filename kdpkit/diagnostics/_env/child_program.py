"""Modules of kdpkit that run in processes of their own, with a time limit and nothing left behind.

TensorFlow and JAX may hang, or end the process that loads them. So `kdpkit env` runs
them in child processes, each of which ends with `report`.
"""

import contextlib
import dataclasses
import getpass
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdpkit import cluster, errors
from kdpkit._internal import child_processes
from kdpkit.diagnostics import _text

WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"
_SIGN = "kdpkit-report "  # begins the line in which a process reports
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_KERNEL_SECONDS = 10.0  # for a process that was killed to be gone
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 4  # of what is searched for: "root" is a user, and "a" a letter
_PART = r"[^\s/\\'\":;,()]+"
_DIRECTORIES = re.compile(rf"(?<![\w./\\])(?:~|[A-Za-z]:)?(?:[/\\]{_PART})+[/\\](?={_PART})|~[/\\]")


def report(work: Callable[[], dict[str, Any]]) -> int:
    """Run something in the child process, print what came of it, and return the exit code."""
    try:
        found = {"result": WORKS} | work()
    except errors.InputError as error:
        found = {"result": CANNOT, "reason": str(error)}
    except Exception as error:  # of any kind: what training raises is to be reported
        traceback.print_exc()
        found = {"result": FAILED, "reason": _text.reason_of(error)}
    sys.stdout.write(f"\n{_SIGN}{json.dumps(found)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return [WORKS, FAILED, CANNOT].index(found["result"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        result: `"works"`, `"cannot"`, `"failed"` or `"timed out"`.
        seconds: From its start to its end.
        reason: Why it does not work.
        reports: What each of its processes reported, if all work.
    """

    result: str
    seconds: float
    reason: str = ""
    reports: Sequence[dict[str, Any]] = ()


def outcome(exit_code: int | None, seconds: float, stdout: str, stderr: str) -> Outcome:
    """Judge a program by its reports and its exit code, which is None if it took too long."""
    lines = [line.partition(_SIGN)[2] for line in stdout.splitlines() if _SIGN in line]
    reports = [json.loads(line) for line in lines]
    for result in (CANNOT, FAILED):
        for found in reports:
            if found["result"] == result:
                return Outcome(result, seconds, without_secrets(found["reason"]))
    if exit_code is None:
        reason = f"It did not end within {seconds:.0f} s. Allow it longer with --timeout."
        return Outcome(TIMED_OUT, seconds, reason)
    if exit_code or not reports:
        return Outcome(FAILED, seconds, _ending(exit_code, stderr))
    return Outcome(WORKS, seconds, reports=reports)


def _ending(exit_code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {without_secrets(lines[-1]).rstrip('.')}" if lines else ""
    if exit_code > 128 and exit_code - 128 in set(signal.Signals):
        return f"It was ended by {signal.Signals(exit_code - 128).name}{last}."
    return f"It ended with exit code {exit_code}{last}."


class Program:
    """A Python module that runs, with all processes that it starts."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], mark: str) -> None:
        self._mark = mark
        self._has_ended = threading.Event()
        self._written: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self.child = child_processes.Child(
            [sys.executable, "-m", *words],
            _environment(variables),
            mark=mark,
            on_bytes=lambda data, stream: self._written[stream].append(data),
            on_end=self._has_ended.set,
        )

    def wait(self, timeout_seconds: float) -> Outcome:
        """Wait until it has ended; end it when the time is up."""
        left = self.child.started_at + timeout_seconds - time.monotonic()
        is_in_time = self._has_ended.wait(max(0.0, left))
        seconds = (self.child.ended_at or time.monotonic()) - self.child.started_at
        if not is_in_time:
            self.end()
        stdout, stderr = (
            b"".join([*self._written[stream]]).decode(errors="replace")
            for stream in ("stdout", "stderr")
        )
        return outcome(self.child.exit_code if is_in_time else None, seconds, stdout, stderr)

    def end(self) -> None:
        """End what is left of it."""
        self.child.send(signal.SIGTERM)
        child_processes.end_marked(
            self._mark, grace_seconds=_GRACE_SECONDS, signalled_groups={self.child.group}
        )
        self._has_ended.wait(_GRACE_SECONDS)
        self.child.send(signal.SIGKILL)  # where there is no /proc
        self._has_ended.wait(_KERNEL_SECONDS)


@contextlib.contextmanager
def started(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[Program]:
    """Run a module of kdpkit with these variables, in no cluster, and end it with the block.

    However this process ends, nothing of the program is left: the guard ends it even if a second
    Ctrl-C interrupts the end.

    Args:
        words: The module's name, and its arguments.
        variables: Variables to set beside those of this process.
    """
    mark = f"{uuid.uuid4().hex};"
    with child_processes.Guard(mark, grace_seconds=_GRACE_SECONDS) as guard:
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


# Reports are pasted into issues.


def without_secrets(text: str) -> str:
    """Return a text without directories, names of machine and user, and values of secrets.

    >>> without_secrets("No such file: /home/ann/data/x.txt")
    'No such file: x.txt'
    """
    home = str(Path.home())
    if len(home) >= _SHORTEST:
        text = text.replace(home, "~")
    text = _DIRECTORIES.sub("", text)
    secrets = [value for name, value in os.environ.items() if _SECRET.search(name)]
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, "...")
    for name in (socket.gethostname(), _user()):
        if len(name) >= _SHORTEST:
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container that does not know its user
        return ""
