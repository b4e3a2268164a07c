"""What is written in the background ends, and how it ended is reported once."""

import pathlib
import subprocess
import sys
import threading
import warnings

import pytest

import kdpkit
from kdpkit.checkpoints import _background as background

ROOT = pathlib.Path(kdpkit.__file__).parent.parent


def fail():
    raise ValueError("no such place")


def test_a_path_is_written_by_one_at_a_time_and_others_are_not_waited_for(tmp_path):
    go_on, seen = threading.Event(), []
    background.start(tmp_path / "a", lambda: go_on.wait(60) and seen.append("first"))
    background.start(tmp_path / "b", lambda: seen.append("other"))
    background.wait(tmp_path / "b")
    assert seen == ["other"]
    go_on.set()
    background.start(tmp_path / "x" / ".." / "a", lambda: seen.append("second"))
    background.wait(tmp_path / "a")
    assert seen == ["other", "first", "second"]


@pytest.mark.parametrize("report", [background.wait, lambda path: background.start(path, int)])
def test_what_went_wrong_is_reported_once(tmp_path, report):
    background.start(tmp_path, lambda: "the disk is full")
    with pytest.warns(UserWarning, match="the disk is full"):
        report(tmp_path)
    background.start(tmp_path, fail)
    with pytest.raises(ValueError, match="no such place"):
        report(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        background.wait(tmp_path)


ENDING = """
import sys, time
from kdpkit.checkpoints import _background as background

def write():
    time.sleep(0.5)
    open(sys.argv[1], "w").close()
    return "the disk is full"

background.start(sys.argv[1], write)
raise RuntimeError("training failed")
"""


def test_a_program_that_fails_ends_when_all_is_written_and_reports_it(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, tmp_path / "file"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (tmp_path / "file").exists()
    assert ended.returncode == 1
    assert "training failed" in ended.stderr
    assert "the disk is full" in ended.stderr
