"""What tests that start processes need; the fixture `mark` is in conftest.py."""

import fcntl
import json
import os
import time

from kdpkit._internal import child_processes

SOON = 240.0  # seconds, for what takes one where nothing else runs


def left_of(mark):
    """Wait until the processes that bear a mark have ended; return those that do not."""
    deadline = time.monotonic() + SOON
    while (left := child_processes.marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for_file(file):
    """Wait until a file is there."""
    deadline = time.monotonic() + SOON
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not come"
        time.sleep(0.05)


def once(tmp_path_factory, name, make):
    """Return what the first of pytest's own processes makes; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = root / f"{name}.json"
        if not made.exists():
            made.write_text(json.dumps(make(), default=float))
        return json.loads(made.read_text())
