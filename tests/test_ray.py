"""The programs for Ray Train, with real workers, one of which is killed."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from kdpkit.checkpoints import CheckpointDirectory, Position
from kdpkit.launch import _child_processes as child_processes
from tests.processes import ROOT, wait_for_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not importlib.util.find_spec("ray"),
        reason='Ray Train is not installed (pip install "ray[train]")',
    ),
]


@pytest.fixture
def start(mark, tmp_path, monkeypatch):  # noqa: ARG001 no process is left
    """Return a function that starts a program, whose directory gets a name."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sessions = tempfile.mkdtemp(prefix="ray-")  # paths of sockets are short
    monkeypatch.setenv("RAY_TMPDIR", sessions)
    started = []

    def start(program, name, workers):
        flags = ["--workers", str(workers), "--epochs", "4", "--directory", tmp_path / name]
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, ROOT / "recipes/cluster" / program, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    shutil.rmtree(sessions)


@pytest.mark.parametrize(
    "program", ["ray_jax.py", pytest.param("ray_tensorflow.py", marks=pytest.mark.exhaustive)]
)
def test_two_workers_one_of_them_killed_train_what_one_trains(program, start, mark, tmp_path):
    disturbed = start(program, "disturbed", workers=2)
    wait_for_file(tmp_path / "disturbed/state/state-000001-000000000.npz")
    os.kill(workers_of(mark)[-1], signal.SIGKILL)
    found = result(disturbed, tmp_path / "disturbed")
    expected = result(start(program, "undisturbed", workers=1), tmp_path / "undisturbed")
    assert found.position == expected.position == Position(4, 0)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, values in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def result(process, directory):
    """Return the last state of a program, once it has ended."""
    code, log = process.wait(400), directory.with_suffix(".log").read_text()
    assert code == 0, log
    assert re.search(r"^{'accuracy': .*'loss': ", log, re.MULTILINE)
    return CheckpointDirectory(directory / "state").latest()


def workers_of(mark):
    """Return the processes in which Ray trains."""
    return [
        pid
        for pid in child_processes.marked(mark)
        if b"RayTrainWorker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
