"""Programs of kdpkit in processes of their own, with a time limit, and what came of them.

TensorFlow and JAX may hang, or end the process that loads them. A program ends with `report`.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdpkit import cluster, errors
from kdpkit._internal import checks

WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"
HARMLESS = (WORKS, CANNOT)
_SIGN = "kdpkit-report "  # begins the line in which a process reports


def report(work: Callable[[], Any]) -> int:
    """Run something in the child process, print what came of it, and return the exit code."""
    try:
        found = WORKS, work()
    except errors.InputError as error:
        found = CANNOT, str(error)
    except Exception as error:  # of any kind: what training raises is to be reported
        traceback.print_exc()
        found = FAILED, checks.reason_of(error)
    sys.stdout.write(f"\n{_SIGN}{json.dumps(found)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return [WORKS, FAILED, CANNOT].index(found[0])


def run(
    words: Sequence[str], variables: Mapping[str, str], timeout_seconds: float
) -> tuple[str, Any]:
    """Run a module of kdpkit with these variables, in no cluster, and end it when the time is up.

    What `kdpkit launch` started ends with it, however it ends.

    Returns:
        The result, and what the program returned, or why it does not work.
    """
    kept = {name: text for name, text in os.environ.items() if name not in cluster.VARIABLES}
    quiet = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        ended = subprocess.run(  # noqa: S603 this Python
            [sys.executable, "-m", *words],
            env=kept | quiet | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        limit = f"It did not end within {timeout_seconds:g} s. Allow it longer with --timeout."
        return TIMED_OUT, limit
    lines = [line.partition(_SIGN)[2] for line in ended.stdout.splitlines() if _SIGN in line]
    reports = [json.loads(line) for line in lines]
    for result, reason in reports:
        if result != WORKS:
            return result, _without_home(reason)
    if ended.returncode or not reports:
        last = [f": {line.strip(' .')}" for line in ended.stderr.splitlines() if line.strip()][-1:]
        reason = f"It ended with exit code {ended.returncode}{''.join(last)}."
        return FAILED, _without_home(reason)
    return WORKS, reports[0][1]


def _without_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")
