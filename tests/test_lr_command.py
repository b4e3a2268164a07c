"""`kdpkit lr`: schedules drawn in the terminal and as a picture, and given as JSON."""

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
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == COSINE
    assert NOAM in lines
    assert max(map(len, lines)) <= 80
    tables = [line.split(maxsplit=2) for line in lines if "end of warmup" in line]
    assert tables == [
        ["100", "0.001", "end of warmup, peak"],
        ["400", "0.00221", "end of warmup, peak"],
    ]
    assert any("⠀" < character <= "⣿" for character in said.out)
    assert "\x1b" not in said.out


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
    said = capsys.readouterr()
    assert "printed by the module" in said.err
    found = json.loads(said.out)
    assert found["steps"] == 50
    firsts = [each["learning_rates"][0] for each in found["schedules"]]
    assert firsts == [0.5, 0.25, 1.0, 0.125]


def test_the_picture_has_every_schedule(tmp_path, capsys):
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
        ([], "the following arguments are required: SCHEDULE"),
        (["CosinDecay(1, 2)"], "Do you mean `CosineDecay`?"),
        (["__import__('os').getcwd()"], "There is no schedule"),
        (["cosine"], "`cosine` is no number"),
        ([NOAM], "None of the schedules has an end. Say how many steps"),
        ([NOAM, "--steps", "0"], "`steps` must be a positive integer"),
        (["nowhere.py:make"], "There is no such file: nowhere.py"),
        (["{module}:nothing"], "has no `nothing`"),
        (["{module}:broken"], "broken` fails: RuntimeError: mine"),
        (["{module}:wrong", "--steps", "5"], "must be a keras.optimizers.schedules"),
        ([COSINE, "--plot", "missing/rates.png"], "directory does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, module, capsys):
    assert cli.main(["lr", *(word.replace("{module}", str(module)) for word in words)]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    own = [line for line in said.err.splitlines() if line != "printed by the module"]
    assert len(own) == 1


def test_the_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lr", "--help"])
    assert 'kdpkit lr "warmup_cosine(1e-3, total_steps=1000' in capsys.readouterr().out


def lr(*words, stdout, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kdpkit", "lr", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_where_there_is_only_ascii_the_curve_is_of_asterisks():
    finished = lr("CosineDecay(1.0, 50)", stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert finished.returncode == 0, finished.stderr.decode()
    first = finished.stdout.decode("ascii").splitlines()[1]
    assert first.strip().startswith("1 |*")


@pytest.mark.slow
def test_on_a_terminal_the_curve_is_in_colour():
    pty = pytest.importorskip("pty", reason="a terminal of POSIX")
    reading, writing = pty.openpty()
    environment = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "NO_COLOR": ""}
    finished = lr("0.5", "--steps", "9", stdout=writing, **environment)
    os.close(writing)
    said = os.read(reading, 1 << 16).decode()
    os.close(reading)
    assert finished.returncode == 0, finished.stderr.decode()
    assert "\x1b[36m⠉" in said


@pytest.mark.parametrize("steps", [2**31, 2**63 - 1, 10**20])
def test_more_steps_than_jax_counts_are_refused(capsys, steps):
    assert cli.main(["lr", COSINE, "--steps", str(steps)]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert f"steps={steps}" in said.err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "needs the name of a file"),
        (".", "needs the name of a file"),
        ("rates", "suffix must be that of a kind"),
        ("rates.foo", "suffix must be that of a kind"),
        ("missing/rates.png", "directory does not exist"),
        ("loop.png", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_and_leaves_no_file(
    capsys, monkeypatch, tmp_path, name, problem
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.png").symlink_to("loop.png")
    assert cli.main(["lr", COSINE, "--plot", name]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert problem in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["loop.png"]
