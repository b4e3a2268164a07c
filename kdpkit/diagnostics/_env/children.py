"""Programs of kdpkit in processes of their own, with a time limit, and what came of them.

TensorFlow and JAX may hang, or end the process that loads them. A program ends with `report`; what
it says goes into issues, and holds no path, name or secret.
"""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdpkit import cluster, errors
from kdpkit.diagnostics import _text

WORKS, CANNOT, FAILED, TIMED_OUT = "works", "cannot", "failed", "timed out"
HARMLESS = (WORKS, CANNOT)
_SIGN = "kdpkit-report "  # begins the line in which a process reports
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 4  # of what is searched for: "root" is a user, and "a" a letter
_PART = r"[^\s/\\'\":;,()]+"
_DIRECTORIES = re.compile(rf"(?<![\w./\\])(?:~|[A-Za-z]:)?(?:[/\\]{_PART})+[/\\](?={_PART})|~[/\\]")


def report(work: Callable[[], Any]) -> int:
    """Run something in the child process, print what came of it, and return the exit code."""
    try:
        found = WORKS, work()
    except errors.InputError as error:
        found = CANNOT, str(error)
    except Exception as error:  # of any kind: what training raises is to be reported
        traceback.print_exc()
        found = FAILED, _text.reason_of(error)
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
            return result, without_secrets(reason)
    if ended.returncode or not reports:
        last = [f": {line.strip(' .')}" for line in ended.stderr.splitlines() if line.strip()][-1:]
        reason = f"It ended with exit code {ended.returncode}{''.join(last)}."
        return FAILED, without_secrets(reason)
    return WORKS, reports[0][1]


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
