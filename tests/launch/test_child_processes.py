"""The guard, which ends what a launcher leaves, however that comes to leave it."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from kdpkit.launch import _child_processes as child_processes

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("mark"),
]
MARK = "of-this-test;"


def sleeping():
    """Start a process that bears the mark, which /proc shows soon after it has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {child_processes.MARK: os.environ[child_processes.MARK] + MARK},
        start_new_session=True,
    )
    while process.pid not in child_processes.marked(MARK):
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_guard_ends_what_is_left_unless_it_is_dismissed(error):
    with contextlib.suppress(error or ()), child_processes.Guard(MARK, grace_seconds=1.0):
        left = sleeping()
        if error:
            raise error
    assert left.wait(timeout=10) < 0
    assert child_processes.marked(MARK) == []


def test_a_guard_that_is_dismissed_ends_nothing():
    with child_processes.Guard(MARK, grace_seconds=1.0) as guard:
        left = sleeping()
        guard.all_ended()
    time.sleep(1.0)
    assert left.poll() is None
    left.kill()
    left.wait()
