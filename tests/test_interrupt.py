"""Ctrl-C is sent for real, to a recipe that trains."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

RECIPES = pathlib.Path(__file__).parents[1] / "recipes"


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
