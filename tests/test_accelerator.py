"""`python -m tools.accelerator`, rehearsed on CPUs, and what it does where it cannot measure."""

import dataclasses
import json
import os
import pathlib
import signal

import pytest

from tests.processes import Process, Together, wait_for_file
from tests.python_without import python_without
from tools.accelerator import __main__ as command
from tools.accelerator import bert, speed

REHEARSED = ("correct", "watching", "bert")  # the others do the same with larger models
EXPLAINED = ("PyTorch is not installed", "no nvidia-smi")

pytestmark = pytest.mark.tensorflow  # once: it starts processes on JAX


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parts_are_rehearsed_without_tensorflow_and_ctrl_c_keeps_the_finished(tmp_path):
    # Its own compilation cache and flags, as on the machine that it is for.
    ours = ("KERAS_", "JAX_", "XLA_", "TF_")
    python, out = python_without(tmp_path / "python", "tensorflow", "torch"), tmp_path / "figures"
    flags = ["--rehearse", "--rounds=1", f"--out={out}"]
    command = [python, "-m", "tools.accelerator", *flags, *REHEARSED, "gpt2"]
    removed = dict.fromkeys(name for name in os.environ if name.startswith(ours))
    with Together([Process(*command, **removed)]) as started:
        started.wait_for("gpt2 ...", seconds=1500)
        wait_for_file(out / "gpt2.json")  # its contestants start
        started[0].send(signal.SIGINT)
        assert started.end() == [130], started.shown
    (shown,) = started.shown
    assert "interrupted." in shown
    assert "Traceback" not in shown
    running = [file.read_bytes() for file in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(str(out).encode() in line for line in running)
    assert "steps a call" in shown
    found = {part: json.loads((out / f"{part}.json").read_text()) for part in REHEARSED}
    for part, of_part in found.items():
        for sentence in of_part["missing"]:
            assert any(map(sentence.count, EXPLAINED)), (part, sentence)
    assert len(found["correct"]["rows"]) == 6
    assert all(row["is_met"] for row in found["correct"]["rows"])
    others = {name for name in speed.WAYS if "PyTorch" not in name} - {speed.OURS}
    rates = [row for row in found["bert"]["rows"] if row["other"]]
    assert {row["what"].partition("against ")[2] for row in rates} == others
    assert all(row["ours"]["median"] > 0 < row["other"]["median"] for row in rates)
    assert {"devices" in row["what"] for row in found["watching"]["rows"]} == {True, False}
    summary = (out / "summary.md").read_text()
    assert all(row["what"] in summary for of_part in found.values() for row in of_part["rows"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["berd"], "there is no part 'berd', choose from gpt2, slow_steps"),
        (["bert"], "has files already: "),
    ],
)
def test_wrong_words_raise_before_figures_of_an_earlier_run_are_replaced(
    words, sentence, tmp_path, capsys
):
    (tmp_path / "bert.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path), *words])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert (tmp_path / "bert.json").read_text() == "{}"


def test_the_operations_of_bert_are_six_for_each_weight_and_token():
    size = dataclasses.replace(bert.SIZES[False], masked=0, length=1)  # no attention to speak of
    weights = 12 * 12 * 768**2
    assert bert.work(size).flops == pytest.approx(6.0 * weights * size.batch * size.steps, rel=1e-3)
