"""Recipes under launchers: two processes that train as one, or a sentence; never two copies."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile

import numpy as np
import pytest

from kdpkit.checkpoints import CheckpointDirectory, Position
from kdpkit.launch import _child_processes as child_processes
from tests.processes import SOON, Process, Together, wait_for_file

STARTS = {
    "kdpkit": [sys.executable, "-m", "kdpkit", "launch", "--workers", "2", "--", sys.executable],
    "Open MPI": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
    "MPICH or Intel MPI": ["mpiexec.hydra", "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("mark"),
]


def run(launcher, *command, backend):
    if launcher == "Open MPI" and not shutil.which("mpirun"):
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    if launcher == "MPICH or Intel MPI" and not shutil.which("mpiexec.hydra"):
        pytest.skip("MPICH is not installed (pip install mpich)")
    if launcher == "torchrun" and not importlib.util.find_spec("torch"):
        pytest.skip("torchrun is not installed (pip install torch)")
    with Together([Process(*STARTS[launcher], *command, KERAS_BACKEND=backend)]) as started:
        return *started.end(SOON), *started.shown


@pytest.mark.parametrize("launcher", STARTS)
@pytest.mark.parametrize(
    ("recipe", "backend", "described"),
    [
        ("multi_worker.py", "tensorflow", "CPU:0 of each of 2 workers"),
        ("cnn_jax.py", "jax", "the CPU, as 2 devices"),
    ],
)
def test_two_processes_train_as_one(launcher, recipe, backend, described, tmp_path):
    results, logs = tmp_path / "results.json", tmp_path / "logs"
    flags = ["--smoke", "--log-dir", logs, "--results", results]
    code, shown = run(launcher, f"recipes/{recipe}", *flags, backend=backend)
    assert code == 0, shown
    assert described in shown
    assert shown.count("Test - ") == 1
    found = json.loads(results.read_text())
    assert (found["replicas"], found["global_batch_size"], found["steps"]) == (2, 16, 8)
    assert [path.name for path in logs.glob("*.keras")] == ["model.keras"]


@pytest.mark.parametrize("launcher", [*STARTS][1:])
def test_a_recipe_that_would_train_copies_raises(launcher, tmp_path):
    flags = ["--smoke", "--log-dir", tmp_path / "logs"]
    code, shown = run(launcher, "recipes/cnn_fit.py", *flags, backend="tensorflow")
    assert code == (1 if launcher == "torchrun" else 2), shown  # torchrun prints the exit code
    assert f"{launcher} started this process with others" in shown
    assert "processes=2" in shown
    assert 'cnn_fit.py", line' not in shown  # no traceback, but for torchrun's own
    assert not any((tmp_path / "logs").rglob("*"))


# Programs for Ray Train, in whose processes its threads train.


@pytest.fixture
def train_on_ray(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sessions = tempfile.mkdtemp(prefix="ray-")  # paths of sockets are short
    monkeypatch.setenv("RAY_TMPDIR", sessions)

    def train(program, workers, disturb=lambda states: None):  # noqa: ARG005
        states = tmp_path / str(workers)
        flags = ["--workers", workers, "--epochs", 4, "--directory", states]
        with Together([Process(sys.executable, f"recipes/cluster/{program}", *flags)]) as started:
            disturb(states / "state")
            assert started.end() == [0], started.shown
        assert re.search(r"^{'accuracy': .*'loss': ", started[0].shown, re.MULTILINE)
        return CheckpointDirectory(states / "state").latest()

    yield train
    shutil.rmtree(sessions)


@pytest.mark.skipif(
    not importlib.util.find_spec("ray"),
    reason='Ray Train is not installed (pip install "ray[train]")',
)
@pytest.mark.parametrize(
    "program", ["ray_jax.py", pytest.param("ray_tensorflow.py", marks=pytest.mark.exhaustive)]
)
def test_two_workers_of_ray_one_of_them_killed_train_what_one_trains(program, train_on_ray, mark):
    def kill_a_worker(states):
        wait_for_file(states / "state-000001-000000000.npz")
        files = {pid: pathlib.Path(f"/proc/{pid}/cmdline") for pid in child_processes.marked(mark)}
        workers = [pid for pid, file in files.items() if b"RayTrainWorker" in file.read_bytes()]
        os.kill(workers[-1], signal.SIGKILL)

    found = train_on_ray(program, 2, kill_a_worker)
    expected = train_on_ray(program, 1)
    assert found.position == expected.position == Position(4, 0)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, values in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
