"""What tests that start processes share; the fixture `mark` is in conftest.py."""

import time

from kdpkit import _children

SOON = 240.0  # seconds, for what takes one where nothing else runs


def left_of(mark):
    """Wait until the processes that bear a mark have ended; give those that do not."""
    deadline = time.monotonic() + SOON
    while (left := _children.marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for_file(file):
    """Wait until a file is there."""
    deadline = time.monotonic() + SOON
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not come"
        time.sleep(0.05)
