"""`python -m tests.accelerator`, rehearsed on CPUs, and what it does where it cannot measure."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import pytest

from tests.accelerator import __main__ as command
from tests.accelerator import bert, device, resnet, speed, wheels
from tests.accelerator.results import Results
from tests.benchmarks.paired import Row, Spread
from tests.python_without import python_without

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.tensorflow  # once: it starts processes on JAX


def started(python, *words):
    # Its own compilation cache and flags, as on the machine that it is for.
    ours = ("KERAS_", "JAX_", "XLA_", "TF_", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.Popen(
        [str(python), "-m", "tests.accelerator", *map(str, words)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


REHEARSED = ("correct", "bert", "profile", "watching")  # the others take minutes more
EXPLAINED = ("PyTorch is not installed", "not report its memory", "no nvidia-smi")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return a Python as on such a machine, without TensorFlow."""
    return python_without(
        tmp_path_factory.mktemp("without") / "python", "tensorflow", "tf_keras", "torch"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_parts_are_rehearsed_without_tensorflow_and_ctrl_c_keeps_the_finished(python, tmp_path):
    out = tmp_path / "figures"
    process = started(python, "--rehearse", "--rounds", 1, "--out", out, *REHEARSED, "resnet")
    try:
        deadline = time.monotonic() + 1000
        while not (out / "resnet.json").exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)  # its contestants start
    finally:
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted." in stderr
    assert "Traceback" not in stderr
    running = [file.read_bytes() for file in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(str(out).encode() in line for line in running)
    assert "steps a call" in stdout
    found = {part: json.loads((out / f"{part}.json").read_text()) for part in REHEARSED}
    for part, of_part in found.items():
        for sentence in of_part["missing"]:
            assert any(map(sentence.count, EXPLAINED)), (part, sentence)
    assert len(found["correct"]["rows"]) == 15
    assert all(row["is_met"] for row in found["correct"]["rows"])
    others = {name for name in bert.WAYS if "PyTorch" not in name} - {speed.OURS}
    rates = [row for row in found["bert"]["rows"] if row["other"]]
    assert {row["what"].partition("against ")[2] for row in rates} == others
    assert all(row["ours"]["median"] > 0 < row["other"]["median"] for row in rates)
    assert {"devices" in row["what"] for row in found["watching"]["rows"]} == {True, False}
    summary = (out / "summary.md").read_text()
    assert all(row["what"] in summary for of_part in found.values() for row in of_part["rows"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["berd"], "there is no part 'berd', choose from correct, bert"),
        (["--rounds", "0"], "--rounds must be at least 1. Received: 0"),
    ],
)
def test_wrong_words_raise_before_anything_is_measured(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path / "figures"), *words])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_figures_of_an_earlier_run_are_never_replaced(tmp_path, capsys):
    (tmp_path / "bert.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert f"has files already: {tmp_path}" in capsys.readouterr().err
    assert (tmp_path / "bert.json").read_text() == "{}"


@pytest.fixture
def found(monkeypatch):
    """Say what device there is; environment variables are put back afterwards."""
    for name in command._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def find(*of_device):
        monkeypatch.setenv(device._VARIABLE, json.dumps(of_device))

    return find


@pytest.mark.slow
def test_a_machine_without_a_device_is_one_sentence(tmp_path):
    process = started(sys.executable, "--out", tmp_path / "figures")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "JAX sees no GPU or TPU here. With --rehearse" in stderr
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(("gib", "batch"), [(78.0, 256), (40.0, 128), (15.0, 32), (0.0, 256)])
def test_a_smaller_device_gets_a_smaller_batch(gib, batch, found):
    found("gpu", "NVIDIA something", gib, 1)
    assert speed.size_of(bert, rehearse=False).batch == batch
    assert speed.size_of(bert, rehearse=True).batch == bert.SIZES[True].batch


def test_a_device_that_is_too_small_is_one_sentence(found, monkeypatch):
    found("gpu", "NVIDIA something", 4.0, 1)
    monkeypatch.setattr(device, "look", device.current)
    args = command.parser().parse_args(["--out", "figures"])
    assert command.unfit(args) == "the device must have 8 GiB for the models. It has 4.0."


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("Radeon", None),
    ],
)
def test_the_peak_is_the_makers(kind, teraflops):
    peak = device.Device("gpu", kind, 80.0, 1).peak_flops
    assert peak == (teraflops and teraflops * 1e12)


def test_a_file_of_results_is_complete_after_every_row(tmp_path):
    file = tmp_path / "part.json"
    results = Results(file, part="bert")
    assert json.loads(file.read_text()) == {"part": "bert", "rows": [], "missing": []}
    results.add(Row("speed", "s", Spread.of([1.0]), goal=("<=", 0.5)))
    results.miss("memory: there is none.")
    written = json.loads(file.read_text())
    assert [(row["what"], row["is_met"]) for row in written["rows"]] == [("speed", False)]
    assert written["missing"] == ["memory: there is none."]
    assert [*tmp_path.iterdir()] == [file]


def test_the_operations_of_bert_are_six_for_each_weight_and_token():
    size = dataclasses.replace(bert.SIZES[False], masked=0, length=1)  # no attention to speak of
    weights = 12 * 12 * 768**2
    assert bert.work(size).flops == pytest.approx(6.0 * weights * size.batch * size.steps, rel=1e-3)


@pytest.mark.slow
def test_the_operations_of_resnet_are_those_of_its_layers():
    policy = keras.config.dtype_policy()
    try:
        layers = resnet.model_of(resnet.SIZES[False])._flatten_layers()
    finally:
        keras.config.set_dtype_policy(policy)
    flops = 0
    for layer in layers:
        if isinstance(layer, keras.layers.Conv2D):
            height, width = layer.output.shape[1:3]
            flops += 2 * layer.kernel.shape.num_elements() * height * width
        elif isinstance(layer, keras.layers.Dense):
            flops += 2 * layer.kernel.shape.num_elements()
    assert flops == pytest.approx(resnet.FLOPS, rel=1e-3)


def test_wheels_that_there_are_not_are_one_sentence(tmp_path, capsys):
    assert wheels.main([str(tmp_path), "--python", "3.1"]) == 1
    assert "could not be downloaded" in capsys.readouterr().err
