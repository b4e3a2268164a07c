"""`kdpkit doctor`, and what it says of the project's own recipes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kdpkit import cli
from recipes import cnn_fit

RECIPES = pathlib.Path(cnn_fit.__file__).parent
SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "{backend}"
import keras, numpy as np
print("a script that prints")
x, y = np.zeros((64, 8), "float32"), np.zeros(64, "{kind}")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=64)
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
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(backend="jax", kind="int64"))
    found = doctor("--tpu", path, "--json", KERAS_BACKEND="tensorflow")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert report["backend"] == "jax"
    assert [finding["rule"] for finding in report["findings"]] == ["64-bit"]
    assert "a script that prints" in found.stderr


@pytest.mark.slow
def test_a_clean_script_is_one_line_and_notes_and_exit_code_0(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(backend="tensorflow", kind="int32"))
    clean = doctor("--tpu", path)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    first, *rest = clean.stdout.splitlines()
    assert first == "Nothing found (looked at: data, step, widths); not proven on a TPU."
    assert "note     tensorflow: backend" in rest
    assert max(map(len, rest)) <= 80


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
@pytest.mark.parametrize(
    ("recipe", "backend", "flags"),
    [
        ("bert_mlm", "tensorflow", ["--strategy", "one", "--vocabulary-size", "60"]),
        ("bert_mlm", "jax", ["--replicas", "8", "--vocabulary-size", "60"]),
        ("cnn_fit", "tensorflow", ["--strategy", "one"]),
        ("cnn_fit", "jax", ["--replicas", "8"]),
        ("cnn_custom_loop", "tensorflow", ["--strategy", "one", "--remainder", "drop"]),
        ("cnn_custom_loop", "jax", ["--replicas", "8"]),
        ("cnn_jax", "jax", ["--replicas", "8"]),
    ],
)
def test_the_recipes_are_clean(recipe, backend, flags, text, tmp_path):
    size = 64 if "one" in flags else 8
    flags = [*flags, "--data", text] if recipe == "bert_mlm" else flags
    words = ("--tpu", RECIPES / f"{recipe}.py", "--json", "--", "--smoke", "--cache-dir", tmp_path)
    finished = doctor(*words, "--per-replica-batch-size", size, *flags, KERAS_BACKEND=backend)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    report = json.loads(finished.stdout)
    assert report["checked"] == ["data", "step", "widths", "callbacks"]
    assert report["backend"] == backend


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "Write `kdpkit doctor --tpu train.py`"),
        (["--tpu"], "expected one argument"),
        (["--tpu", "nowhere.py"], "There is no such file: nowhere.py"),
        (["--tpu", "train.py", "--replicas", "0"], "`replicas` must be a positive integer"),
        (["--tpu", "kdpkit.scaling:nothing"], "`kdpkit.scaling` has no `nothing`"),
        (["--tpu", "kdpkit:__version__"], "`dataset` must be a `tf.data.Dataset`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, sentence, capsys):
    assert cli.main(["doctor", *flags]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_the_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "kdpkit doctor --tpu recipes/cnn_jax.py --" in capsys.readouterr().out
