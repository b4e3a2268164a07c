"""`kdpkit lr`: schedules drawn in the terminal and as a figure, and given as JSON."""

import json
import os
import subprocess
import sys

import pytest

from kdpkit import cli, schedules

COSINE = "warmup_cosine(1e-3, total_steps=1000, warmup_steps=100)"
NOAM = "NoamDecay(512, 400)"
MODULE = """
import keras
print("printed by the module")
schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 50, 0.0)
rate = 0.25
def make():
    return keras.optimizers.schedules.CosineDecay(1.0, 50)
def broken():
    raise RuntimeError("mine")
def wrong():
    return [0.1]
class Own(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.125 * keras.ops.ones_like(step, dtype="float32")
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "lr_command_schedules.py"
    path.write_text(MODULE)
    yield path
    sys.modules.pop(path.stem, None)


def test_schedules_are_drawn_over_their_milestones(capsys):
    assert cli.main(["lr", COSINE, NOAM, "--steps", "1000"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0] == COSINE
    assert NOAM in lines
    assert max(map(len, lines)) <= 80
    tables = [line.split(maxsplit=2) for line in lines if "end of warmup" in line]
    assert tables == [
        ["100", "0.001", "end of warmup, peak"],
        ["400", "0.00221", "end of warmup, peak"],
    ]
    assert any("⠀" < character <= "⣿" for character in output.out)
    assert "\x1b" not in output.out


def test_json_has_rates_at_sampled_steps_and_milestones(capsys):
    assert cli.main(["lr", COSINE, "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 1000
    cosine, constant = found["schedules"]
    assert (cosine["name"], constant["name"]) == (COSINE, "0.5")
    assert set(constant["learning_rates"]) == {0.5}
    assert {0, 100, 999} <= {*cosine["steps"]}
    assert len(cosine["steps"]) == len(cosine["learning_rates"])
    made = schedules.warmup_cosine(1e-3, total_steps=1000, warmup_steps=100)
    expected = schedules.preview(made, cosine["steps"])
    assert cosine["learning_rates"] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-10)
    assert cosine["milestones"][1] == {
        "step": 100,
        "event": "end of warmup, peak",
        "learning_rate": 0.001,
    }


def test_files_name_schedules_rates_classes_and_functions(module, capsys):
    names = [f"{module}:{name}" for name in ("schedule", "rate", "make", "Own")]
    assert cli.main(["lr", *names, "--json"]) == 0
    output = capsys.readouterr()
    assert "printed by the module" in output.err
    found = json.loads(output.out)
    assert found["steps"] == 50
    firsts = [each["learning_rates"][0] for each in found["schedules"]]
    assert firsts == [0.5, 0.25, 1.0, 0.125]


def test_the_figure_has_every_schedule(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.svg"
    assert cli.main(["lr", COSINE, NOAM, "--plot", str(path)]) == 0
    drawn = path.read_text()
    assert NOAM in drawn
    assert COSINE in drawn
    assert COSINE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["CosinDecay(1, 2)"], "Do you mean `CosineDecay`?"),
        ([NOAM], "None of the schedules has a known end"),
        ([NOAM, "--steps", "0"], "`steps`"),
        ([COSINE, "--steps", str(10**20)], "steps=100000"),
        (["nowhere.py:make"], "There is no such file: nowhere.py"),
        (["{module}:broken"], "broken` fails: RuntimeError: mine"),
        (["{module}:wrong", "--steps", "5"], "must be a keras.optimizers.schedules"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, module, capsys):
    assert cli.main(["lr", *(word.replace("{module}", str(module)) for word in words)]) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert output.out == ""
    own = [line for line in output.err.splitlines() if line != "printed by the module"]
    assert len(own) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_where_there_is_only_ascii_the_curve_is_of_asterisks():
    finished = subprocess.run(
        [sys.executable, "-m", "kdpkit", "lr", "CosineDecay(1.0, 50)"],
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=True,
    )
    first = finished.stdout.decode("ascii").splitlines()[1]
    assert first.strip().startswith("1 |*")
    assert b"rebuild TensorFlow" not in finished.stderr  # what TensorFlow logs of its own


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (".", "needs the name of a file"),
        ("rates.foo", "suffix must be one that matplotlib"),
        ("missing/rates.png", "directory does not exist"),
    ],
)
def test_a_figure_that_cannot_be_written_is_an_error_and_leaves_no_file(
    capsys, monkeypatch, tmp_path, name, problem
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lr", COSINE, "--plot", name]) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    assert problem in output.err
    assert not list(tmp_path.iterdir())
