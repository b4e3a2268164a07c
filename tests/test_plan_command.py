"""`kdpkit plan`: one plan or several, as a table; and memory."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdpkit import cli
from tests.processes import run

RUN = ["--examples", "60000", "--per-replica-batch-size", "32", "--base-learning-rate", "0.1"]


def plan(*words):
    return cli.main(["plan", *RUN, *words])


def test_several_replicas_are_lines_of_one_table(capsys):
    assert plan("--replicas", "8", "1", "2", "--optimizer", "sgd", "--epochs", "5") == 0
    output = capsys.readouterr()
    names, *rows = (re.split(r"\s\s+", line.strip()) for line in output.out.splitlines())
    found = dict(zip(names, zip(*rows, strict=True), strict=True))
    assert found["replicas"] == ("1", "2", "8")
    assert found["steps"] == ("9,375", "4,685", "1,170")


def into(output):
    command = [sys.executable, "-m", "kdpkit", "plan", *RUN]
    ended = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )
    return ended.returncode, ended.stderr


def test_nobody_who_reads_the_output_is_no_error():
    """As in `kdpkit plan ... | head -1`, with the reader gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        assert into(output) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a disk that is full")
def test_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        code, output = into(full)
    assert code == 1
    assert output.startswith("kdpkit: The output cannot be written (No space left on device).")
    assert output.count("\n") == 1


MAKE = """
import keras, numpy as np
from kdpkit.batches import ArrayBatches

def make():
    print("made")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(16)])
    model.compile("adam", "mse")
    return ArrayBatches((np.zeros((32, 64)), np.zeros((32, 16))), global_batch_size=32), model
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_is_planned_for_replicas_that_are_not_there(tmp_path):
    (tmp_path / "train.py").write_text(MAKE)
    words = ["plan", "--replicas", "4", "--memory", "1GiB", "train.py:make"]
    command = [sys.executable, "-m", "kdpkit", *words]
    ended = run(*command, cwd=tmp_path, KERAS_BACKEND="jax", check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("32 examples on 4 replicas, 1,024 MiB on each. In MiB:\n")
    chosen = "The cheapest that fits: none.\n\n    keras.distribution.set_distribution("
    assert f'{chosen}kdpkit.sharding.DataParallel(4, shard="none"))\n' in ended.stdout
    assert "made" in ended.stderr
