"""`kdpkit env --try`: what works, what fails or hangs; and that no process is left.

Where a test is about processes and not about training, a program of a line stands instead of JAX in
the processes that are started.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from kdpkit import cli
from kdpkit._internal import child_processes
from kdpkit.diagnostics._env import strategy_trials
from tests.processes import SOON, wait_for_file

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mark")]

# A process that leaves its group and does not want to end, besides the one that hangs.
HANGS = """
import pathlib, subprocess, sys, time
stubborn = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(600)"
)
other = subprocess.Popen(
    [sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE
)
other.stdout.readline()
pathlib.Path({began!r}).touch()
time.sleep(600)
"""
RUN_ALL = """
import sys
from kdpkit.diagnostics._env import strategy_trials
strategy_trials.run_all({"jax": {"CPU": 1}}, 600, print)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a function that puts a program instead of JAX."""

    def put(program):
        (tmp_path / "jax.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


def tried_on_jax(timeout_seconds):
    (trial,) = strategy_trials.run_all({"jax": {"CPU": 1}}, timeout_seconds, lambda _: None)
    assert trial.name == "jax"
    return trial


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_strategy_trains_what_one_device_does(capsys, monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    code = cli.main(["env", "--try", "--json", "--timeout", str(SOON)])
    found = json.loads(capsys.readouterr().out)
    trials = {trial["name"]: trial["text"] for trial in found["strategies"]}
    assert {trial["result"] for trial in found["strategies"]} == {"works"}, found["strategies"]
    assert list(trials) == [
        "numbers",
        "one",
        "mirrored",
        "multi_worker",
        "parameter_server",
        "jax",
    ]
    assert code == int(not found["clean"])
    assert trials["numbers"].startswith("random numbers by position are those of the CPU; float32 ")
    assert "2 replicas on" in trials["mirrored"]
    assert "each of 2 workers" in trials["multi_worker"]
    assert "workers: 1, parameter servers: 1" in trials["parameter_server"]


@pytest.mark.slow
def test_what_takes_too_long_is_ended_with_all_that_it_started(planted, tmp_path):
    planted(HANGS.format(began=str(tmp_path / "began")))
    trial = tried_on_jax(8)
    assert (trial.result, trial.works_or_cannot) == ("timed out", False)
    assert "within 8 s" in trial.text
    assert (tmp_path / "began").exists()


def test_what_raises_fails_with_the_error_and_the_way_to_see_more(planted):
    planted("raise RuntimeError('broken')")
    trial = tried_on_jax(SOON)
    assert str(trial) == (
        "failed: RuntimeError: broken. `python -m kdpkit.diagnostics._env.strategy_trials jax` "
        "shows all that it prints."
    )


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_no_process(planted, tmp_path, mark):
    planted(HANGS.format(began=str(tmp_path / "began")))  # which takes the grace to end
    with subprocess.Popen([sys.executable, "-c", RUN_ALL], stderr=subprocess.DEVNULL) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(signal.SIGINT)
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        running.wait(timeout=SOON)
    assert child_processes.marked(mark) == []


@pytest.mark.parametrize(
    ("gpus", "flags", "on_cpu"),
    [
        (0, {}, {"mirrored", "multi_worker", "parameter_server"}),
        (1, {"parameter_server": "1"}, {"mirrored", "multi_worker"}),
        (5, {"multi_worker": "2", "parameter_server": "1"}, set()),
    ],
)
def test_gpus_are_shared_and_one_is_left_for_two_cpus(gpus, flags, on_cpu):
    devices = {"tensorflow": {"CPU": 1} | ({"GPU": gpus} if gpus else {})}
    programs = {name: rest for name, *rest in strategy_trials._programs(devices)}
    assert "jax" not in programs
    assert {name for name, (_, variables) in programs.items() if variables} == on_cpu
    found = {
        name: words[words.index("--gpus-per-worker") + 1]
        for name, (words, _) in programs.items()
        if "--gpus-per-worker" in words
    }
    assert found == flags


@pytest.mark.parametrize(("weights", "differs"), [
    ((0.5, 3.0), False),
    ((0.5, 3.0 + 1.9e-5), False),
    ((0.5, 3.0 + 2.1e-5), True),
    ((0.5, float("nan")), True),
])  # fmt: skip
def test_weights_that_one_device_does_not_train_fail(weights, differs):
    start, one = np.array([0.0, 1.0]), np.array([0.5, 3.0])  # changed by 0.5 and 2.0
    found = (start, np.array(weights))
    if not differs:
        strategy_trials._compare(found, (start, one), 1e-5)
        return
    with pytest.raises(ArithmeticError, match="does not train what one device does"):
        strategy_trials._compare(found, (start, one), 1e-5)


@pytest.mark.tensorflow
def test_numbers_that_do_not_go_on_from_a_position_are_found():
    strategy_trials._compare_random_numbers("CPU:0", "StatelessRandomUniformV2", tf.float64)
    with pytest.raises(ArithmeticError, match="float64 draws other numbers on CPU:0 from a pos"):
        # Of these each takes as many numbers of the counter as it needs.
        strategy_trials._compare_random_numbers("CPU:0", "StatelessTruncatedNormalV2", tf.float64)


def test_quick_and_try_is_a_mistake(capsys):
    assert cli.main(["env", "--quick", "--try"]) == 2
    assert "try_strategies=True" in capsys.readouterr().err
