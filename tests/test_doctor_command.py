"""`kdpkit doctor`, and what it says of the project's own recipes."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import pytest

from kdpkit import cli
from recipes import cnn_fit

RECIPES = pathlib.Path(cnn_fit.__file__).parent
SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "{backend}"
import keras, numpy as np
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "{kind}")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=64)
"""
PRINTING = """
import atexit, os, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(10000,)).start()  # which is not a daemon
atexit.register(print, "printed at the end")
print("printed by Python")
sys.__stdout__.write("printed past sys.stdout\\n")
os.write(1, b"printed to the descriptor\\n")
subprocess.run(["echo", "printed by a child"], check=True)
"""


def doctor(*words, **environment):
    """Run it in a process of its own, as its user does."""
    return subprocess.run(
        [sys.executable, "-m", "kdpkit", "doctor", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_a_script_chooses_its_backend_and_stdout_has_the_report_alone(tmp_path):
    """It also leaves a thread behind, for which the command does not wait."""
    path = tmp_path / "train.py"
    path.write_text(PRINTING + SCRIPT.format(backend="jax", kind="int64"))
    found = doctor("--tpu", path, "--json", KERAS_BACKEND="tensorflow")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert report["backend"] == "jax"
    assert [finding["rule"] for finding in report["findings"]] == ["64-bit"]
    for printed in ("by Python", "past sys.stdout", "to the descriptor", "by a child"):
        assert f"printed {printed}" in found.stderr


def test_what_is_printed_while_python_ends_is_not_on_stdout(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import atexit\natexit.register(print, 'at the end')\n")
    stopped = doctor("--tpu", path)
    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert "at the end" in stopped.stderr


@pytest.mark.slow
def test_a_clean_script_is_one_line_and_notes_and_exit_code_0(tmp_path):
    """Packages are in `dist-packages`, as in Colab and on Debian; Keras casts labels to int64."""
    packages = tmp_path / "dist-packages"
    packages.symlink_to(pathlib.Path(keras.__file__).parents[1])
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(backend="tensorflow", kind="int32"))
    paths = os.pathsep.join([str(packages), os.environ["PYTHONPATH"]])
    clean = doctor("--tpu", path, PYTHONPATH=paths)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    first, *rest = clean.stdout.splitlines()
    assert first == "Nothing found (looked at: data); not proven on a TPU."
    assert "note     tensorflow: backend" in rest
    assert max(map(len, rest)) <= 80


def test_ctrl_c_is_one_sentence_and_exit_code_130(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import time\nprint('waits', flush=True)\ntime.sleep(10000)\n")
    command = [sys.executable, "-m", "kdpkit", "doctor", "--tpu", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "waits\n"
        running.send_signal(signal.SIGINT)
        _, output = running.communicate(timeout=240)
    assert (running.returncode, output) == (130, "kdpkit: Stopped by Ctrl-C.\n")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of lines long enough to train on."""
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = ["replicas", "train", "exactly", "what", "one", "device", "would", "train", "on", "it"]
    lines = (" ".join(words[i % 10 :] + words * 3) for i in range(2000))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recipe_is_clean_for_a_tpu(text, tmp_path, capfd):
    words = ("--tpu", RECIPES / "bert_mlm.py", "--json", "--", "--smoke", "--cache-dir", tmp_path)
    words = (*words, "--per-replica-batch-size", 64, "--strategy", "one", "--data", text)
    code = cli.main(["doctor", *map(str, words), "--vocabulary-size", "60"])
    printed = capfd.readouterr().out
    assert code == 0, printed
    report = json.loads(printed)
    assert (report["checked"], report["backend"]) == (["data", "callbacks"], "tensorflow")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "Write `kdpkit doctor train.py`"),
        (["--tpu", "a.py", "b.py"], "target='b.py', tpu='a.py'"),
        (["--measure", "--tpu", "a.py"], "Write `kdpkit doctor --measure train.py`."),
        (["train.py", "--seconds", "3"], "`--seconds` is about `--measure`."),
        (["kdpkit:__version__", "--measure"], "`model` must be a Keras model"),
        (["train.py", "--workers", "0"], "`workers`"),
        (["kdpkit:__version__"], "There is no `tf.data` pipeline to check."),
        (["--tpu", "nowhere.py"], "There is no such file: nowhere.py"),
        (["--tpu", "kdpkit:__version__"], "`dataset` must be a `tf.data.Dataset`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, sentence, capsys):
    assert cli.main(["doctor", *flags]) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert output.out == ""
    assert output.err.count("\n") == 1


INPUT = """
import keras, tensorflow as tf
ds = tf.data.Dataset.from_tensor_slices((tf.zeros([64, 8]), tf.zeros([64], tf.int32)))
train, held_out = {train}, ds.shuffle(64).batch(16).cache()
if __name__ == "__main__":
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(train, validation_data=held_out, {asked})
"""
FROZEN, FRESH = "ds.shuffle(64).cache().batch(16)", "ds.cache().shuffle(64).batch(16)"


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["", ":train"])
def test_the_input_of_a_script_or_a_dataset_is_looked_at(name, tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(INPUT.format(train=FROZEN, asked=""))
    assert cli.main(["doctor", f"{path}{name}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1 finding (looked at: train{'' if name else ', validation'})."
    assert lines[2] == "wrong    shuffle-before-cache: train: cache, stage 3 of 4"
    assert max(map(len, lines)) <= 80


@pytest.mark.tensorflow
def test_a_clean_input_is_exit_code_0_and_json_holds_the_report(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(INPUT.format(train=FRESH, asked=""))
    assert cli.main(["doctor", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"clean": True, "checked": ["train", "validation"], "findings": []}


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("repeat", "asked", "rules"),
    [
        ("", "epochs=3, steps_per_epoch=4", set()),
        ("repeat(3)", "epochs=3, steps_per_epoch=4", set()),
        ("repeat(3)", "epochs=5, initial_epoch=4", set()),
        ("repeat(3)", "epochs=2", {"repeat"}),
        ("", "epochs=2, steps_per_epoch=5", {"runs-out"}),
    ],
)
def test_repeats_are_judged_by_what_the_script_asks_of_fit(repeat, asked, rules, tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(INPUT.format(train=f"{FRESH}.{repeat}".rstrip("."), asked=asked))
    assert cli.main(["doctor", str(path), "--json"]) == bool(rules)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["rule"] for finding in findings if finding["level"] != "note"} == rules


@pytest.mark.tensorflow
def test_the_fit_of_a_loop_is_asked_for_its_epochs_too(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(
        INPUT.format(train=f"{FRESH}.repeat(3)", asked="")
        .replace("import keras", "import keras, kdpkit.training")
        .replace("model.compile(", "loop = kdpkit.training.TrainingLoop(model, optimizer=")
        .replace("keras.losses", "loss=keras.losses")
        .replace("model.fit(train, validation_data=", "loop.fit(train, epochs=2, validation=")
    )
    assert cli.main(["doctor", str(path), "--json"]) == 1
    assert "2 = 6 times" in capsys.readouterr().out


@pytest.mark.tensorflow
def test_steps_that_are_no_count_are_one_sentence(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text(INPUT.format(train=FRESH, asked="steps_per_epoch=64 / 16"))
    assert cli.main(["doctor", str(path)]) == 2
    output = capsys.readouterr().err
    assert "`steps_per_epoch` must be a positive integer. Received: steps_per_epoch=4.0." in output


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_input_of_a_recipe_is_clean(tmp_path, capsys):
    flags = ["--smoke", "--cache-dir", str(tmp_path), "--strategy", "one"]
    code = cli.main(["doctor", str(RECIPES / "cnn_fit.py"), "--json", "--", *flags])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["checked"], found["clean"]) == (0, ["train"], True)


SLOW = """
import keras, numpy as np, time
class Reading(keras.utils.PyDataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(0.05)
        return np.zeros((16, 8), "float32"), np.zeros(16, "int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
print("before the fit")
model.fit(Reading())
raise SystemExit("goes on after its fit")
"""


@pytest.mark.tensorflow
def test_a_script_is_measured_at_its_fit_and_the_report_alone_is_on_stdout(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(SLOW)
    assert cli.main(["doctor", "--measure", str(path), "--seconds", "1", "--json"]) == 1
    found = capfd.readouterr()
    report = json.loads(found.out)
    assert report["step_seconds"] > 0.9 * 0.05  # the end of the first may be noted late
    assert report["waiting_share"] > 0.5
    assert "before the fit" in found.err
    assert "goes on after" not in found.err
