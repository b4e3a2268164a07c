"""`kdpkit bench`: real processes that train, fail, are ended, and leave nothing behind.

Where a test is about processes and not about training, a program of a line stands in the place of
TensorFlow or JAX in the processes that it starts.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from kdpkit import _children, cli
from tests.processes import SOON, wait_for_file

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("mark")]

QUICK = ("--seconds", "0.2", "--rounds", "2", "--timeout", str(SOON))
TRAINS = """
import keras, numpy as np
def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return (np.zeros((20, 4), "float32"), np.zeros(20, "int32")), model
def uncompiled():
    return make()[0], keras.Sequential([keras.layers.Dense(3)])
def fails():
    raise RuntimeError("no data at /home/somebody/data")
number = 3
"""


@pytest.fixture
def train(tmp_path):
    """Give the path of a program with functions that make a training."""
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def benched(capsys, *words):
    """Run it in this process; give the exit code and the report."""
    code = cli.main(["bench", "--json", *map(str, words)])
    report = json.loads(capsys.readouterr().out)
    assert report["works"] == (code == 0)
    return code, report


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("workload", "backend"),
    [
        ("cnn", "jax"),
        ("bert", "tensorflow"),
        pytest.param("cnn", "tensorflow", marks=pytest.mark.exhaustive),
        pytest.param("bert", "jax", marks=pytest.mark.exhaustive),
    ],
)
def test_a_workload_is_trained_on_one_device_and_on_two(capsys, workload, backend):
    jit = "on" if backend == "jax" else "off"  # both without a trial
    words = ("--workload", workload, "--backend", backend, "--jit", jit, *QUICK)
    code, report = benched(capsys, *words, "--replicas", 2, "--per-replica-batch-size", 4)
    rows = report["rows"]
    assert (code, [row["result"] for row in rows]) == (0, ["measured"] * 2), rows
    assert [(row["replicas"], row["global_batch_size"]) for row in rows] == [(1, 4), (2, 8)]
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["steps_per_second"] <= high
        assert row["examples_per_second"] == pytest.approx(
            row["steps_per_second"] * row["global_batch_size"]
        )
        assert row["peak_memory_gib"] > 0
    assert rows[1]["where"].lower().endswith("2 replicas on cpu:0, cpu:1")
    speeds = [row["examples_per_second"] for row in rows]
    assert rows[1]["efficiency"] == pytest.approx(speeds[1] / speeds[0] / 2)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_choice_of_xla_is_made_before_anything_is_timed(capsys):
    words = ("--replicas", 1, "--per-replica-batch-size", 4, "--backend", "tensorflow", *QUICK)
    assert benched(capsys, *words, "--jit", "measure")[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.exhaustive)]
)
def test_a_target_is_trained_with_its_own_batches_or_others(train, capsys, backend):
    words = (f"{train}:make", "--replicas", 1, 2, "--backend", backend, *QUICK)
    code, report = benched(capsys, *words)
    sizes = [(row["per_replica_batch_size"], row["global_batch_size"]) for row in report["rows"]]
    assert (code, sizes) == (0, [(20, 20), (20, 40)]), report
    code, report = benched(capsys, *words, "--global-batch-size", 6)
    sizes = [(row["per_replica_batch_size"], row["global_batch_size"]) for row in report["rows"]]
    assert (code, sizes, report["scaling"]) == (0, [(6, 6), (3, 6)], "strong"), report


@pytest.mark.slow
def test_what_no_memory_holds_is_a_row_and_no_failure(capsys):
    words = ("--replicas", 1, "--per-replica-batch-size", 4, 10**12, "--jit", "off", *QUICK)
    code, report = benched(capsys, *words)
    assert [row["result"] for row in report["rows"]] == ["measured", "out of memory"]
    assert code == 0
    assert "The rows of a batch alone need" in report["rows"][1]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "result", "reason"),
    [
        ("uncompiled", "cannot", "The model is not compiled, so it has no training step."),
        ("number", "cannot", "must be a function that gives (dataset, model)"),
        ("nothing", "cannot", "`train.py` has no `nothing`"),
        ("fails", "cannot", "fails: RuntimeError: no data at data"),
    ],
)
def test_a_target_that_gives_no_training_is_a_row_with_its_reason(
    train, capsys, name, result, reason
):
    words = (f"{train}:{name}", "--replicas", 1, "--backend", "tensorflow", *QUICK)
    code, report = benched(capsys, *words)
    (row,) = report["rows"]
    assert (code, row["result"]) == (1, result)
    assert reason in row["reason"]
    assert "somebody" not in row["reason"]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Give a function that puts a program in the place of TensorFlow and JAX."""

    def put(program):
        for name in ("tensorflow", "jax"):
            (tmp_path / f"{name}.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


ONE = ("--replicas", "1", "--per-replica-batch-size", "4", "--backend", "jax")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory"),
        ("import os; os._exit(3)", "failed"),
        ("raise RuntimeError('RESOURCE_EXHAUSTED: no bytes')", "out of memory"),
        ("import time; time.sleep(600)", "timed out"),
    ],
)
def test_a_process_that_ends_otherwise_is_a_row(planted, capsys, program, result):
    planted(program)
    code, report = benched(capsys, *ONE, "--timeout", "5" if "sleep" in program else str(SOON))
    assert (code, report["rows"][0]["result"]) == (1, result)
    assert report["verdict"] == "Nothing could be measured."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_it_leaves_no_process(planted, tmp_path, mark, number):
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
        running.send_signal(number)
        out, said = running.communicate(timeout=SOON)
    assert out == ""
    if number == signal.SIGINT:
        assert running.returncode == 130
        assert said.endswith("kdpkit: Stopped by Ctrl-C.\n")
        assert _children.marked(mark) == []


def test_the_table_is_on_stdout_in_80_columns_and_what_is_done_on_stderr(planted, capsys):
    planted("raise ValueError('" + "word " * 40 + "')")
    assert cli.main(["bench", *ONE]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "cnn on JAX, weak scaling: the same rows on each replica."
    assert lines[2].split()[:3] == ["replicas", "rows", "each"]
    assert max(map(len, lines)) <= 80
    assert said.err == "Measuring 1 replica with 4 rows each ...\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--replicas", "0"], "`replicas` must be a positive integer"),
        (["--replicas", "two"], "argument --replicas: invalid int value: 'two'"),
        (["--replicas"], "expected at least one argument"),
        (["--workload", "gpt"], "`workload` must be one of 'cnn', 'bert'"),
        (["--jit", "maybe"], "invalid choice: 'maybe'"),
        (["--backend", "torch"], "`backend` must be one of 'tensorflow', 'jax'"),
        (["--global-batch-size", "9", "--replicas", "2"], "sizes that work are 8 and 10"),
        (["nowhere.py:make"], "There is no such file: nowhere.py"),
        (["train.py"], "`file.py:name`"),
        (["--", "x"], "it takes nothing after `--`: x. What there is, `kdpkit bench --help`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert cli.main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_the_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "kdpkit bench --workload bert --replicas 1 2 4" in capsys.readouterr().out
