"""`kdpkit env`: what it prints; where a framework is missing."""

import os
import re
import signal
import subprocess
import sys

import pytest

from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, run, wait_for_file
from tests.python_without import python_without

pytestmark = pytest.mark.timeout(600)


def env(*words, python=sys.executable, **environment):
    return run(python, "-m", "kdpkit", "env", *words, check=False, **environment)


@pytest.mark.slow
def test_what_chose_the_backend_is_reported_and_no_variable_is_shown(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax", "floatx": "float32"}')
    output = env(KERAS_HOME=tmp_path, KERAS_BACKEND="", USER="me", API_KEY="pl4nted")
    assert output.returncode == 0, output.stdout
    assert re.search(r"^  backend +jax \(chosen by keras.json\)$", output.stdout, re.MULTILINE)
    assert "pl4nted" not in output.stdout
    assert max(map(len, output.stdout.splitlines())) <= 80


def test_ctrl_c_is_one_sentence_and_leaves_no_process(tmp_path, mark):
    (tmp_path / "jax.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(600)"
    )
    (tmp_path / "tensorflow.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "env"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(signal.SIGINT)
        _, output = running.communicate(timeout=SOON)
    assert (running.returncode, output) == (130, "kdpkit: Stopped by Ctrl-C.\n")
    assert child_processes.marked(mark) == []


def test_without_tensorflow_and_jax_it_reports_what_is_missing_and_how_to_install_it(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow", "jax")
    output = env(python=python, KERAS_BACKEND="tensorflow")
    assert output.returncode == 1, output.stderr
    for framework in ("tensorflow", "jax"):
        assert re.search(f"^  {framework} +not installed. Run `", output.stdout, re.MULTILINE)
    assert "It is Keras' backend" in output.stdout
    assert "pip install" in output.stdout
    assert max(map(len, output.stdout.splitlines())) <= 80
