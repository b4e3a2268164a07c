"""`kdpkit bench`: real processes that train; and nothing is left behind.

Where a test is about processes and not about training, a program of a line stands instead of
TensorFlow or JAX in the processes that it starts. What a child process reports of a target, and how
its end is judged, is tested in tests/diagnostics/test_bench.py, without processes.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from kdpkit import cli
from kdpkit._internal import child_processes
from tests.processes import SOON, wait_for_file

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mark")]

QUICK = ("--seconds", "0.2", "--rounds", "2", "--timeout", str(SOON))
TRAINS = """
import keras, numpy as np
def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return (np.zeros((20, 4), "float32"), np.zeros(20, "int32")), model
"""


def benched(capsys, *words):
    """Run it in this process; give the exit code and the report."""
    code = cli.main(["bench", "--json", *map(str, words)])
    report = json.loads(capsys.readouterr().out)
    assert report["works"] == (code == 0)
    return code, report


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("workload", "backend", "jit", "replicas"),
    [
        ("cnn", "jax", "on", (1, 2)),
        ("cnn", "tensorflow", "measure", (1,)),
        ("bert", "tensorflow", "off", (1,)),
        pytest.param("bert", "jax", "on", (1, 2), marks=pytest.mark.exhaustive),
        pytest.param("bert", "tensorflow", "measure", (1, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_a_workload_is_trained_on_one_device_and_on_two(capsys, workload, backend, jit, replicas):
    words = ("--workload", workload, "--backend", backend, "--jit", jit, *QUICK)
    code, report = benched(capsys, *words, "--replicas", *replicas, "--per-replica-batch-size", 4)
    rows = report["rows"]
    assert (code, {row["result"] for row in rows}) == (0, {"measured"}), rows
    assert [row["global_batch_size"] for row in rows] == [4 * count for count in replicas]
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["steps_per_second"] <= high
        assert row["examples_per_second"] == pytest.approx(
            row["steps_per_second"] * row["global_batch_size"]
        )
        assert row["peak_memory_gib"] > 0
    if len(replicas) > 1:
        assert rows[1]["where"].lower().endswith("2 replicas on cpu:0, cpu:1")
        speeds = [row["examples_per_second"] for row in rows]
        assert rows[1]["efficiency"] == pytest.approx(speeds[1] / speeds[0] / 2)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.exhaustive)]
)
def test_a_target_is_trained_with_its_own_batches(tmp_path, capsys, backend):
    (tmp_path / "train.py").write_text(TRAINS)
    words = (f"{tmp_path / 'train.py'}:make", "--replicas", 1, 2, "--backend", backend, *QUICK)
    code, report = benched(capsys, *words)
    sizes = [(row["per_replica_batch_size"], row["global_batch_size"]) for row in report["rows"]]
    assert (code, sizes) == (0, [(20, 20), (20, 40)]), report


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a function that puts a program instead of TensorFlow and JAX."""

    def put(program):
        for name in ("tensorflow", "jax"):
            (tmp_path / f"{name}.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


ONE = ("--replicas", "1", "--per-replica-batch-size", "4", "--backend", "jax")


def test_ctrl_c_is_one_sentence_and_leaves_no_process(planted, tmp_path, mark):
    planted(
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "kdpkit", "bench", *ONE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        wait_for_file(tmp_path / "began")
        running.send_signal(signal.SIGINT)
        out, output = running.communicate(timeout=SOON)
    assert (out, running.returncode) == ("", 130)
    assert output.endswith("kdpkit: Stopped by Ctrl-C.\n")
    assert child_processes.marked(mark) == []


def test_the_table_is_on_stdout_in_80_columns_and_what_is_done_on_stderr(planted, capsys):
    planted("raise ValueError('" + "word " * 40 + "')")
    assert cli.main(["bench", *ONE]) == 1
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].startswith("cnn on JAX, weak scaling")
    assert lines[2].split()[:3] == ["replicas", "each", "global"]
    assert max(map(len, lines)) <= 80
    assert output.err == "Measuring 1 replica with 4 examples each ...\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--replicas", "two"], "argument --replicas: invalid int value: 'two'"),
        (["--jit", "maybe"], "invalid choice: 'maybe'"),
        (["--backend", "torch"], "'torch'"),
        (["train.py"], "`file.py:name`"),
        (["--", "x"], "it takes nothing after `--`: x. See `kdpkit bench --help`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert cli.main(["bench", *words]) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)
