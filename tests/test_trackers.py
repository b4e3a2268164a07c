"""Weights & Biases, MLflow and TensorBoard log one run of several replicas, once and exactly.

Real packages, without a network. Each process trains in several ways, since starting is what costs.
"""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import kdpkit
from tests.processes import SOON, with_tf_config

ROOT = pathlib.Path(kdpkit.__file__).parent.parent
MISSING = [name for name in ("mlflow", "wandb") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("mark"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{' and '.join(MISSING)} not installed: pip install 'kdpkit[trackers]'",
    ),
]

STEPS = 4  # in each of the two epochs, on two replicas
PLAN = {"replicas": 2, "per_replica_batch_size": 5, "rule": "linear", "learning_rate": 2e-3}


def applied(steps):
    """Return the rate of the last of so many steps."""
    return 1e-4 + (PLAN["learning_rate"] - 1e-4) * (1 - (steps - 1) / 12)


def program(*words, backend="tensorflow"):
    """Run the program; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tracker_process", *words],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def result_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def check(found, history, *, prefix="", rate="learning_rate", replicas=2):
    """Compare the one run that each tracker has with History; `prefix` is that of W&B's names."""
    (in_wandb,), (in_mlflow,) = found["wandb"], found["mlflow"]
    assert in_wandb["exit"] == 0
    assert in_mlflow["status"] == "FINISHED"
    plan = PLAN | {"replicas": replicas, "learning_rate": replicas * 1e-3}
    assert plan.items() <= in_wandb["config"].items()
    assert {name: str(value) for name, value in plan.items()}.items() <= in_mlflow["config"].items()
    assert len(found["boards"]) == 2  # the curves, and the plan

    epochs = in_wandb["history"]
    assert [epoch[f"{prefix}epoch"] for epoch in epochs] == [0, 1]
    for name in ("loss", "learning_rate", "steps_per_second", "examples_per_second"):
        expected = pytest.approx(history[name])
        in_order = sorted(in_mlflow["history"][name])
        assert [step for step, _ in in_order] == [0, 1]
        assert [value for _, value in in_order] == expected
        written = rate if name == "learning_rate" else name
        assert [epoch[prefix + written] for epoch in epochs] == expected
        assert min(history[name]) > 0
    if replicas == 2:
        assert history["learning_rate"] == pytest.approx([applied(STEPS), applied(2 * STEPS)])


def check_all(directory, histories):
    """Check a run by `fit`, one by a loop, and one with W&B's own callback."""
    found = program("read", str(directory))
    check(found["fit"], histories["fit"])
    check(found["loop"], histories["loop"])
    theirs = {"prefix": "epoch/", "rate": "applied_learning_rate"}
    check(found["WandbMetricsLogger"], histories["WandbMetricsLogger"], **theirs)
    # It logs the next step's rate itself. If not, the page has a callback too many.
    (run,) = found["WandbMetricsLogger"]["wandb"]
    assert [epoch["epoch/learning_rate"] for epoch in run["history"]] == pytest.approx(
        [applied(STEPS + 1), applied(2 * STEPS + 1)]
    )
    return found


@pytest.mark.exhaustive
def test_mirrored_replicas_log_one_run(tmp_path):
    ways = ("fit", "loop", "WandbMetricsLogger", "autolog, fit", "autolog, loop")
    histories = program("train", str(tmp_path), "mirrored", *ways)
    found = check_all(tmp_path, histories)
    (automatic,) = found["autolog, fit"]["mlflow"]  # which began before `replica_exact`
    recorded = [value for _, value in sorted(automatic["history"]["learning_rate"])]
    assert recorded == pytest.approx(histories["autolog, fit"]["learning_rate"])
    assert len(histories["autolog, loop"]["loss"]) == 2
    assert found["autolog, loop"]["mlflow"] == []


def test_only_the_first_of_two_processes_logs(tmp_path):
    ways = ("fit", "loop", "WandbMetricsLogger")
    runs = tmp_path / "runs"
    command = ("-m", "tests.tracker_process", "train", runs, "multi_worker", *ways)
    with with_tf_config(*command) as workers:
        assert workers.end(SOON) == [0, 0], workers.shown
    first, second = map(result_of, workers.shown)
    assert first["fit"]["loss"] == second["fit"]["loss"]
    check_all(runs, first)


@pytest.mark.exhaustive
def test_a_run_that_loses_a_process_is_logged_as_failed(tmp_path):
    runs = tmp_path / "runs"
    command = ("-m", "tests.tracker_process", "train", runs, "multi_worker", "killed")
    with with_tf_config(*command) as workers:
        assert workers.end(SOON) == [43, -signal.SIGKILL], workers.shown
    (in_wandb,), (in_mlflow,), _ = program("read", str(runs))["killed"].values()
    assert in_wandb["exit"] == 1
    assert in_mlflow["status"] == "FAILED"
    for history in (in_wandb["history"], in_mlflow["history"]["loss"]):
        assert len(history) == 1


@pytest.mark.exhaustive
def test_runs_are_logged_on_jax(tmp_path):
    ways = ("fit", "loop", "WandbMetricsLogger")
    histories = program("train", str(tmp_path), "none", *ways, backend="jax")
    found = program("read", str(tmp_path))
    for way in ("fit", "loop"):
        check(found[way], histories[way], replicas=1)
    assert "has no attribute 'numpy'" in histories["WandbMetricsLogger"]
