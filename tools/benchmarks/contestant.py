"""A contestant in a process of its own, which trains an epoch whenever it is asked to.

Several prepare together, each with its own framework and compiler, and then train alternately.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence


class Contestant:
    """A process that calls `serve`.

    Args:
        command: What starts it.
        environment: Its variables; None for those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=None if environment is None else {**environment},
        )

    def seconds(self) -> float:
        """Let it train an epoch, when it is prepared; return its seconds, NaN if it has ended."""
        answer = self._asked("train")
        return float("nan") if answer is None else answer["seconds"]

    def peak_bytes(self) -> int | None:
        """Return the peak of its device's memory, where the device reports that."""
        return (self._asked("memory") or {}).get("peak_bytes")

    def end(self) -> None:
        """End the process, and wait for that."""
        self._process.kill()
        self._process.communicate()

    def _asked(self, question: str) -> dict | None:
        try:
            print(question, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return None
        return self._answer()

    def _answer(self) -> dict | None:
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print too
                return json.loads(line)
        return None


def serve(epoch: Callable[[], object], peak_bytes: Callable[[], int | None] = lambda: None) -> None:
    """Answer on standard output, in a contestant's process, until standard input ends.

    Args:
        epoch: Trains, and returns when all of it is done.
        peak_bytes: Returns the peak of the device's memory.
    """
    for question in sys.stdin:
        if question.strip() == "memory":
            _reply({"peak_bytes": peak_bytes()})
            continue
        start = time.perf_counter()
        epoch()
        _reply({"seconds": time.perf_counter() - start})


def _reply(answer: dict) -> None:
    print(json.dumps(answer), flush=True)
