"""`kdpkit probe`: what works, what cannot, what fails or hangs; and that no process is left.

Where a test is about processes and not about training, a program of a line stands instead of
TensorFlow or JAX in the processes that the probe starts.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from kdpkit import cli
from kdpkit._internal import child_processes
from kdpkit.diagnostics import _child_program
from kdpkit.diagnostics._probe import probing
from tests.processes import SOON, wait_for_file
from tests.python_without import python_without

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


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a function that puts a program instead of TensorFlow and JAX."""

    def put(program):
        for name in ("tensorflow", "jax"):
            (tmp_path / f"{name}.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


def probed(capsys, *words):
    """Run it in this process; give the exit code and the rows by name."""
    code = cli.main(["probe", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert report["works"] == (code == 0)
    return code, {result["name"]: result for result in report["results"]}


# Real training.


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "where",
    [
        {"one": "1 replica on", "mirrored": "2 replicas on", "multi_worker": "each of 2 workers"},
        pytest.param(
            {"parameter_server": "1 worker, 1 parameter server"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["replicas", "servers"],
)
def test_tensorflow_trains_with_every_strategy_what_one_device_does(capsys, where):
    code, found = probed(capsys, "--only", *where, "--timeout", str(SOON))
    results = {name: result["result"] for name, result in found.items()}
    assert (code, results) == (0, dict.fromkeys(where, "works")), found
    assert all(result["difference"] <= 1e-5 for result in found.values())
    assert all(words in found[name]["where"] for name, words in where.items())


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_jax_trains_on_one_device_and_on_a_mesh_what_one_does(capsys):
    code, found = probed(capsys, "--only", "jax", "--timeout", str(SOON))
    assert (code, [result["result"] for result in found.values()]) == (0, ["works"] * 2), found
    assert found["jax_mesh"]["difference"] <= 1e-5
    assert found["jax_mesh"]["where"].startswith("2 replicas on ")


# What cannot be.


def test_without_a_tpu_the_sentence_says_so_and_the_exit_code_is_0(capsys, monkeypatch):
    for name in ("TPU_NAME", "COLAB_TPU_ADDR", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kdpkit._internal.tpu_host._PCI_DEVICES", pathlib.Path("/nowhere"))
    monkeypatch.setattr("kdpkit._internal.tpu_host.chips", lambda: 0)
    assert cli.main(["probe", "--only", "tpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["strategy", "backend", "result", "seconds", "where"]
    assert printed[1].split() == ["tpu", "TensorFlow", "cannot", "-"]
    assert printed[2].startswith("    There is no TPU")
    assert max(map(len, printed)) <= 80


def test_without_tensorflow_its_ways_cannot_be_and_how_to_install_it_is_reported(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow")
    finished = subprocess.run(
        [python, "-m", "kdpkit", "probe", "--json", "--only", "tensorflow"],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout)["results"]
    assert {result["result"] for result in results} == {"cannot"}
    (reason,) = {result["reason"] for result in results}
    assert reason == (
        'TensorFlow is not installed. Run `python -m pip install "tensorflow>=2.20.0"`.'
    )


# What fails, or hangs, as real processes.


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_takes_too_long_is_ended_with_all_that_it_started(capsys, planted, tmp_path):
    planted(HANGS.format(began=str(tmp_path / "began")))
    code, found = probed(capsys, "--only", "jax_one", "--timeout", "8")
    assert (code, found["jax_one"]["result"]) == (1, "timed out")
    assert "within 8 s" in found["jax_one"]["reason"]
    assert (tmp_path / "began").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_that_takes_too_long_is_ended_too(capsys, planted, tmp_path):
    planted(HANGS.format(began=str(tmp_path / "began")))
    code, found = probed(capsys, "--only", "multi_worker", "--timeout", "15")
    assert (code, found["multi_worker"]["result"]) == (1, "timed out")
    assert "`python -m kdpkit launch --workers 2 " in found["multi_worker"]["reason"]


def test_what_raises_fails_with_the_error_and_the_way_to_see_more(capsys, planted):
    planted("raise RuntimeError('broken')")
    code, found = probed(capsys, "--only", "jax_mesh")
    assert (code, found["jax_mesh"]["result"]) == (1, "failed")
    assert found["jax_mesh"]["reason"].startswith(
        "RuntimeError: broken. `python -m kdpkit.diagnostics._probe.probe_child jax_mesh`"
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_the_probe_ends_it_leaves_no_process(planted, tmp_path, number):
    planted(HANGS.format(began=str(tmp_path / "began")))
    with subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "probe", "--only", "jax_one"], stderr=subprocess.DEVNULL
    ) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(number)
        running.wait(timeout=SOON)  # and the fixture `mark` for what it has started


@pytest.mark.slow
def test_a_second_ctrl_c_while_it_ends_leaves_no_process_either(planted, tmp_path, mark):
    planted(HANGS.format(began=str(tmp_path / "began")))  # which takes the grace to end
    with subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "probe", "--only", "jax_one"],
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(signal.SIGINT)
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        _, output = running.communicate(timeout=SOON)
    assert (running.returncode, child_processes.marked(mark)) == (130, [])
    assert output.endswith("kdpkit: Stopped by Ctrl-C.\n")


# The comparison.


def trained(*weights):
    return {"weights": [*weights], "start": [0.0, 1.0]}


def run_of(*processes):
    return _child_program.Outcome("works", 1.0, reports=processes)


def test_a_difference_is_that_of_the_worst_weight_over_the_largest_change():
    one = trained(0.5, 3.0)  # changed by 0.5 and 2.0
    assert probing._difference(trained(0.5, 3.0), one) == 0.0
    assert probing._difference(trained(0.4, 3.05), one) == pytest.approx(0.05)
    assert probing._difference(trained(0.5, float("nan")), one) == float("inf")


@pytest.mark.parametrize(
    ("processes", "result"),
    [
        ([(0.5, 3.0), (0.5, 3.0)], "works"),
        ([(0.5, 3.0), (0.5, 3.0 + 1.9e-5)], "works"),
        ([(0.5, 3.0), (0.5, 3.0 + 2.1e-5)], "failed"),  # the second process alone is off
        ([(0.5, float("nan"))], "failed"),
    ],
)
def test_replicas_that_train_something_else_fail(processes, result):
    runs = run_of(*(trained(*weights) for weights in processes))
    run, _ = probing._compared(runs, run_of(trained(0.5, 3.0)), 1e-5)
    assert run.result == result
    assert (result == "works") == (run.reason == "")


def test_where_one_device_does_not_train_nothing_is_compared():
    one = _child_program.Outcome("timed out", 9.0, "It did not end.")
    run, difference = probing._compared(run_of(trained(0.5, 3.0)), one, 1e-5)
    assert (run.result, difference) == ("failed", None)
    assert run.reason.endswith("to compare with, timed out: It did not end.")


@pytest.mark.parametrize(
    ("name", "accelerators", "flags", "on_cpu"),
    [
        ("mirrored", 0, "", True),
        ("mirrored", 1, "", True),
        ("mirrored", 2, "", False),
        ("one", 1, "", False),
        ("multi_worker", 1, "--workers 2", True),
        ("multi_worker", 5, "--workers 2 --gpus-per-worker 2", False),
        ("parameter_server", 0, "--workers 1 --parameter-servers 1", True),
        (
            "parameter_server",
            1,
            "--workers 1 --parameter-servers 1 --gpus-per-worker 1",
            False,
        ),
        ("jax_mesh", 1, "", True),
        ("jax_mesh", 8, "", False),
    ],
)
def test_gpus_are_shared_and_one_alone_is_left_for_two_cpus(name, accelerators, flags, on_cpu):
    way = probing._way(name, accelerators)
    assert flags in " ".join(way.words)
    assert ("gpus-per-worker" in flags) == ("--gpus-per-worker" in way.words)
    assert way.on_cpu == on_cpu
    assert (way.variables.get("CUDA_VISIBLE_DEVICES") == "-1") == on_cpu


# Use.


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    assert cli.main(["probe", "--only", "mirrorred"]) == 2
    output = capsys.readouterr()
    assert "'mirrorred'" in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_the_table_reads_in_80_columns():
    worked = probing.ProbeResult("parameter_server", "tensorflow", "works", 12.34, "x " * 60, 0.0)
    failed = dataclasses.replace(worked, result="failed", reason="word " * 60)
    report = probing.ProbeReport((worked, failed))
    assert max(map(len, str(report).splitlines())) <= 80
    assert not report.works
    assert probing.ProbeReport((worked,)).works
