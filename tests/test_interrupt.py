"""Ctrl-C is sent for real, to a recipe that trains."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.processes import run

RECIPES = pathlib.Path(__file__).parents[1] / "recipes"


AT_THE_START = """
import signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            {happens}

sys.meta_path.insert(0, AtImport())
"""
COMES = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize("happens", [COMES, f"exec('try: {COMES}\\nexcept BaseException: pass')"])
def test_ctrl_c_ends_a_program_that_imports_also_where_it_is_caught(happens, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_THE_START.format(happens=happens))
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    ended = run(sys.executable, RECIPES / "cnn_fit.py", "--smoke", check=False, PYTHONPATH=paths)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("recipe", ["cnn_fit.py", "cnn_jax.py"])
def test_ctrl_c_ends_a_program_with_130_and_one_line(tmp_path, recipe):
    resumes = recipe == "cnn_fit.py"
    state = ["--resume", tmp_path / "state"] if resumes else []
    process = subprocess.Popen(
        [sys.executable, RECIPES / recipe, *state, "--smoke", "--epochs", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        while not process.stdout.readline().startswith("Learning rate of epoch 1"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    sentence = f"Training was stopped by Ctrl-C. Its state is in {tmp_path / 'state'}, and the same"
    expected = f"{recipe}: {sentence if resumes else 'Stopped by Ctrl-C.'}"
    assert errors.splitlines()[-1].startswith(expected)
    assert "Traceback" not in errors
