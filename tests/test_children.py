"""The guard, which ends what a launcher leaves, however that comes to leave it."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from kdpkit import _children
from kdpkit.diagnostics import _program
from tests.processes import wait_for_file

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not _children.marked(""), reason="finds strays in /proc"),
]
MARK = "of-this-test;"


def sleeping():
    """Start a process that bears the mark."""
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {_children.MARK: os.environ[_children.MARK] + MARK},
        start_new_session=True,
    )


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_guard_ends_what_is_left_where_it_is_not_told_otherwise(error):
    with contextlib.suppress(error or ()), _children.Guard(MARK, grace_seconds=1.0):
        left = sleeping()
        if error:
            raise error
    assert left.wait(timeout=10) < 0
    assert _children.marked(MARK) == []


def test_a_guard_that_is_told_ends_nothing():
    with _children.Guard(MARK, grace_seconds=1.0) as guard:
        left = sleeping()
        guard.all_ended()
    time.sleep(1.0)
    assert left.poll() is None
    left.kill()
    left.wait()


def test_who_was_stopped_for_longer_than_the_grace_ends_what_is_left_all_the_same(monkeypatch):
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))  # of the waits between
    left = sleeping()
    _children.end_marked(MARK, grace_seconds=5.0)
    monkeypatch.undo()
    assert left.wait(timeout=10) == -signal.SIGKILL


def test_a_program_whose_end_is_interrupted_is_ended_all_the_same(monkeypatch, tmp_path):
    def interrupted(_):
        raise KeyboardInterrupt

    (tmp_path / "hangs.py").write_text(
        "import pathlib, time; pathlib.Path(__file__).with_name('began').touch(); time.sleep(600)"
    )
    monkeypatch.setattr(_program.Program, "end", interrupted)
    paths = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt), _program.started(["hangs"], paths) as program:
        wait_for_file(tmp_path / "began")
    assert program.child.exit_code != 0
    assert not _children.marked(os.environ[_children.MARK])
