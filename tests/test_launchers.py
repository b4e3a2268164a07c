"""Programs under `mpirun`: two processes that train as one, or a sentence; never two copies."""

import shutil
import subprocess
import sys

import pytest

from tests.processes import SOON
from tests.test_workers import ROOT

MPIRUN = shutil.which("mpirun")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(not MPIRUN, reason="Open MPI is not installed (Debian: openmpi-bin)"),
]


def run(*command, backend):
    """Run a program in two processes; return its exit code and what it prints."""
    settings = ["--allow-run-as-root", "--oversubscribe", "-x", f"KERAS_BACKEND={backend}"]
    done = subprocess.run(
        [MPIRUN, *settings, "-n", "2", sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("recipe", "backend", "described"),
    [
        ("multi_worker.py", "tensorflow", "CPU:0 of each of 2 workers"),
        ("cnn_jax.py", "jax", "DataParallel: 2 replicas"),
    ],
)
def test_two_processes_train_as_one(recipe, backend, described, tmp_path):
    flags = ["--smoke", "--log-dir", tmp_path / "logs", "--results", tmp_path / "results.json"]
    code, shown = run(f"recipes/{recipe}", *flags, backend=backend)
    assert code == 0, shown
    assert described in shown
    assert (tmp_path / "results.json").exists()


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_recipe_that_would_train_copies_raises(backend, tmp_path):
    flags = ["--smoke", "--log-dir", tmp_path / "logs"]
    code, shown = run("recipes/cnn_fit.py", *flags, backend=backend)
    assert code == 2, shown
    assert "Open MPI started this process with others" in shown
    assert "processes=2" in shown
    assert "Traceback" not in shown
    assert not any((tmp_path / "logs").rglob("*"))
