"""Programs under `mpirun`: two processes that train as one, or a sentence; never two copies."""

import importlib.util
import json
import shutil
import sys

import pytest

from tests.processes import SOON, Process, Together, free_port

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("mark"),
]


@pytest.fixture(params=["Open MPI", "torchrun"])
def launcher(request):
    """Return the name of a launcher that is installed, and the words that start two processes."""
    if request.param == "Open MPI" and not shutil.which("mpirun"):
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    if request.param == "torchrun" and not importlib.util.find_spec("torch"):
        pytest.skip("torchrun is not installed (pip install torch)")
    return request.param, MPIRUN if request.param == "Open MPI" else TORCHRUN


def run(*command, backend):
    """Run a program in two processes; return its exit code and what it prints."""
    with Together([Process(*command, KERAS_BACKEND=backend)]) as started:
        return *started.end(SOON), *started.shown


@pytest.mark.parametrize(
    ("recipe", "backend", "described"),
    [
        ("multi_worker.py", "tensorflow", "CPU:0 of each of 2 workers"),
        ("cnn_jax.py", "jax", "DataParallel: 2 replicas"),
    ],
)
def test_two_processes_train_as_one(launcher, recipe, backend, described, tmp_path):
    _, start = launcher
    flags = ["--smoke", "--log-dir", tmp_path / "logs", "--results", tmp_path / "results.json"]
    code, shown = run(*start, f"recipes/{recipe}", *flags, backend=backend)
    assert code == 0, shown
    assert described in shown
    assert (tmp_path / "results.json").exists()


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_recipe_that_would_train_copies_raises(launcher, backend, tmp_path):
    name, start = launcher
    flags = ["--smoke", "--log-dir", tmp_path / "logs"]
    code, shown = run(*start, "recipes/cnn_fit.py", *flags, backend=backend)
    assert code == {"Open MPI": 2, "torchrun": 1}[name], shown  # torchrun prints the exit code
    assert f"{name} started this process with others" in shown
    assert "processes=2" in shown
    assert 'cnn_fit.py", line' not in shown  # no traceback, but for torchrun's own
    assert not any((tmp_path / "logs").rglob("*"))


def test_processes_that_know_only_the_first_address_train_as_one(tmp_path):
    known = {
        "KERAS_BACKEND": "tensorflow",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    results, logs = tmp_path / "results.json", tmp_path / "logs"
    flags = ["--smoke", "--results", results, "--log-dir", logs]
    command = [sys.executable, "recipes/multi_worker.py", *flags]
    processes = (Process(*command, **known, JAX_PROCESS_ID=index) for index in "01")
    with Together(processes) as started:
        assert started.end(SOON) == [0, 0], started.shown
    assert "CPU:0 of each of 2 workers" in started[0].shown
    for line in ("Learning rate of epoch 2:", "Test:"):
        assert [line in output for output in started.shown] == [True, False]
    found = json.loads(results.read_text())
    assert (found["replicas"], found["global_batch_size"], found["steps"]) == (2, 16, 8)
    assert (logs / "model.keras").exists()
