"""`kdpkit env --try`: what works, what fails or hangs; and that no process is left."""

import os

import numpy as np
import pytest

from kdpkit import diagnostics
from kdpkit.diagnostics._env import strategy_trials
from tests.processes import SOON

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mark")]


@pytest.mark.slow
def test_strategies_train_what_one_device_does(monkeypatch):
    """All but "parameter_server", which tests/test_recipes.py has: each process takes seconds."""
    programs = strategy_trials.programs

    def quicker(devices):
        return {n: program for n, program in programs(devices).items() if n != "parameter_server"}

    monkeypatch.setattr(strategy_trials, "programs", quicker)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    found = diagnostics.environment(try_strategies=True, timeout_seconds=SOON)
    assert found.devices["jax"] == "CPU: 2"
    assert found.devices["tensorflow"].startswith("CPU: ")
    trials = found.strategies
    assert {result for result, _ in trials.values()} == {"works"}, trials
    assert list(trials) == ["mirrored", "multi_worker", "jax"]
    assert found.clean, found
    assert "2 replicas on" in trials["mirrored"][1]
    assert "each of 2 workers" in trials["multi_worker"][1]


@pytest.mark.parametrize(
    ("program", "timeout", "outcome", "text"),
    [
        (
            "raise RuntimeError('broken')",
            SOON,
            "failed",
            "RuntimeError: broken. `python -m kdpkit.diagnostics._env.strategy_trials jax` shows "
            "all that it prints.",
        ),
        ("import time; time.sleep(600)", 2, "timed out", "It did not end within 2 s."),
        ("import os; os._exit(3)", SOON, "failed", "It ended with exit code 3"),
    ],
    ids=["raises", "hangs", "ends"],
)
def test_what_does_not_work_is_reported(program, timeout, outcome, text, tmp_path, monkeypatch):
    """A program of a line stands instead of JAX in the process that is started."""
    (tmp_path / "jax.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    devices = {"jax": {"CPU": 1}}
    ((name, (result, reported)),) = strategy_trials.run_all(devices, timeout, lambda _: None)
    assert (name, result) == ("jax", outcome)
    assert reported.startswith(text)


@pytest.mark.parametrize(
    ("gpus", "flags", "on_cpu"),
    [
        (0, {}, {"mirrored", "multi_worker", "parameter_server"}),
        (5, {"multi_worker": "2", "parameter_server": "1"}, set()),
    ],
)
def test_gpus_are_shared_and_one_is_left_for_two_cpus(gpus, flags, on_cpu):
    devices = {"tensorflow": {"CPU": 1} | ({"GPU": gpus} if gpus else {})}
    programs = strategy_trials.programs(devices)
    assert {name for name, (_, variables) in programs.items() if variables} == on_cpu
    found = {
        name: words[words.index("--gpus-per-worker") + 1]
        for name, (words, _) in programs.items()
        if "--gpus-per-worker" in words
    }
    assert found == flags


def test_weights_that_one_device_does_not_train_fail():
    start, one = np.array([0.0, 1.0]), np.array([0.5, 3.0])  # changed by 0.5 and 2.0
    strategy_trials.compare((start, one + 1.9e-5), (start, one))
    for differing in (one + 2.1e-5, one * np.nan):
        with pytest.raises(ArithmeticError, match="does not train what one device does"):
            strategy_trials.compare((start, differing), (start, one))
