"""TensorFlow's lines about how it was built are left out, and nothing else is."""

import sys

import pytest

from tests.processes import run

WRITTEN = """
import os, sys
from kdpkit.experiment import _framework_messages
with _framework_messages.hidden():
    os.write(2, b"I0000 00:00:1.5 1 port.cc:153] oneDNN custom operations are on.\\n")
    os.write(2, b"E0000 00:00:1.5 1 a.cc:1] an error\\n")
    print("a line of Python", file=sys.stderr)
    {end}
os.write(2, b"I0000 afterwards\\n")
"""


@pytest.mark.parametrize(
    ("end", "level", "shown"),
    [
        ("pass", "2", ["an error", "a line of Python", "afterwards"]),
        ("pass", "0", ["oneDNN", "an error", "a line of Python", "afterwards"]),
        ("os.abort()", "2", ["an error", "a line of Python"]),
    ],
)
def test_lines_about_the_build_alone_are_left_out_of_stderr(end, level, shown, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    done = run(sys.executable, "-u", "-c", WRITTEN.format(end=end), check=False)
    lines = done.stderr.splitlines()
    assert len(lines) == len(shown)
    assert all(word in line for word, line in zip(shown, lines, strict=True))
