"""Recipes under launchers: two processes that train as one, or a sentence; never two copies."""

import importlib.util
import json
import shutil
import sys

import pytest

from tests.processes import SOON, Process, Together

STARTS = {
    "kdpkit": [sys.executable, "-m", "kdpkit", "launch", "--workers", "2", "--", sys.executable],
    "Open MPI": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("mark"),
]


def run(launcher, *command, backend):
    """Run a program in two processes; return its exit code and what it prints."""
    if launcher == "Open MPI" and not shutil.which("mpirun"):
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    if launcher == "torchrun" and not importlib.util.find_spec("torch"):
        pytest.skip("torchrun is not installed (pip install torch)")
    with Together([Process(*STARTS[launcher], *command, KERAS_BACKEND=backend)]) as started:
        return *started.end(SOON), *started.shown


@pytest.mark.parametrize("launcher", STARTS)
@pytest.mark.parametrize(
    ("recipe", "backend", "described"),
    [
        ("multi_worker.py", "tensorflow", "CPU:0 of each of 2 workers"),
        ("cnn_jax.py", "jax", "DataParallel: 2 replicas"),
    ],
)
def test_two_processes_train_as_one(launcher, recipe, backend, described, tmp_path):
    results, logs = tmp_path / "results.json", tmp_path / "logs"
    flags = ["--smoke", "--log-dir", logs, "--results", results]
    code, shown = run(launcher, f"recipes/{recipe}", *flags, backend=backend)
    assert code == 0, shown
    assert described in shown
    assert shown.count("Test:") == 1
    found = json.loads(results.read_text())
    assert (found["replicas"], found["global_batch_size"], found["steps"]) == (2, 16, 8)
    assert [path.name for path in logs.glob("*.keras")] == ["model.keras"]


@pytest.mark.parametrize("launcher", [*STARTS][1:])
def test_a_recipe_that_would_train_copies_raises(launcher, tmp_path):
    flags = ["--smoke", "--log-dir", tmp_path / "logs"]
    code, shown = run(launcher, "recipes/cnn_fit.py", *flags, backend="tensorflow")
    assert code == {"Open MPI": 2, "torchrun": 1}[launcher], shown  # torchrun prints the exit code
    assert f"{launcher} started this process with others" in shown
    assert "processes=2" in shown
    assert 'cnn_fit.py", line' not in shown  # no traceback, but for torchrun's own
    assert not any((tmp_path / "logs").rglob("*"))
