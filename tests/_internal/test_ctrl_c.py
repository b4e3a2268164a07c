"""Ctrl-C while a program imports what it needs is one line, and exit code 130."""

import os
import sys

import pytest

from tests.processes import ROOT, run

RECIPE = ROOT / "recipes" / "cnn_fit.py"
AT_THE_START = """
import signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {happens}

sys.meta_path.insert(0, AtImport())
"""


def ended(directory, words, module, happens):
    (directory / "sitecustomize.py").write_text(AT_THE_START.format(module=module, happens=happens))
    paths = os.pathsep.join([str(directory), os.environ["PYTHONPATH"]])
    return run(sys.executable, *words, check=False, PYTHONPATH=paths)


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (["-m", "kdpkit", "plan"], "kdpkit.launch", "kdpkit"),
        ([RECIPE, "--smoke"], "kdpkit.scaling", "cnn_fit.py"),
        ([RECIPE, "--smoke"], "keras", "cnn_fit.py"),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(words, module, name, tmp_path):
    done = ended(tmp_path, words, module, "signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stderr) == (130, f"{name}: Stopped by Ctrl-C.\n")


def test_an_import_that_catches_everything_ends_too(tmp_path):
    caught = "try:\n signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n pass"
    done = ended(tmp_path, [RECIPE, "--smoke"], "keras", f"exec({caught!r})")
    assert (done.returncode, done.stderr) == (130, "cnn_fit.py: Stopped by Ctrl-C.\n")


def test_other_errors_keep_their_traceback(tmp_path):
    done = ended(tmp_path, ["-m", "kdpkit"], "kdpkit.cli", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
