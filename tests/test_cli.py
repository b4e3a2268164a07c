"""What all commands have in common."""

import os

import pytest

from kdpkit import cli
from tests.processes import run_code

COMMANDS = ("doctor", "env", "launch", "plan", "recipe")
RUN = ["--examples", "60000", "--per-replica-batch-size", "32", "--base-learning-rate", "0.1"]
MISTAKES = [
    (["env", "--timeout", "0"], "`timeout_seconds` must be above 0"),
    (["launch", "--", "echo"], "the following arguments are required: --workers"),
    (["launch", "--workers", "2"], "The command to run comes after `--`"),
    (["launch", "--workers", "2", "echo", "hi"], "echo hi; those of a program come after `--`"),
    (["plan", *RUN, "--rule", "log"], "`rule` must be one of 'linear', 'sqrt', 'none'"),
    (["plan", *RUN, "--epochs", "many"], "invalid int value: 'many'. See `kdpkit plan --help`"),
    (["plan"], "needs --examples, --per-replica-batch-size, --base-learning-rate, or --memory"),
    (["plan", "--memory", "1GiB", "a.py"], "Write `kdpkit plan --memory 16GiB train.py:make"),
    (["plan", "--memory", "1GiB", "a.py:make", "--replicas", "1", "2"], "replicas=[1, 2]"),
    (["plan", "--memory", "16QB", "a.py:make"], "'80GB'. Received: memory='16QB'"),
    (["doctor"], "the following arguments are required: TARGET"),
    (["doctor", "a.py", "--epochs", "3"], "--epochs 3; those of a program come after `--`"),
    (["lint", "train.py"], "`kdpkit doctor TARGET`; in Python `kdpkit.pipelines.lint`"),
    (["recipe"], "kdpkit recipe"),
    (["recipe", "copy"], "kdpkit recipe"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_an_example_and_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"    kdpkit {command} ") for line in lines)


def test_without_a_command_the_help_is_printed_which_lists_them(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    listed = [line.split()[0] for line in printed.splitlines() if line.startswith("    ")]
    assert set(COMMANDS) <= set(listed)
    assert len(COMMANDS) == len(cli._COMMANDS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *MISTAKES,
        (["plan", "--memory", "1GiB", "missing.py:make"], "missing.py"),
        (["doctor", "os:getcwd", "--measure"], "`model` must be a Keras model"),
        (["doctor", "os:getcwd"], "`dataset` must be a `tf.data.Dataset`"),
        (["doctor", "--tpu", "os:getcwd"], "`dataset` must be a `tf.data.Dataset`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.getenv("XLA_FLAGS", ""))  # put back afterwards
    monkeypatch.setenv("PJRT_NPROC", os.getenv("PJRT_NPROC", "16"))
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


PARSED = """
import contextlib, sys
from kdpkit import cli
for words in {words!r}:
    with contextlib.suppress(SystemExit):
        assert cli.main(words) in (0, 2), words
print(*{{name.partition(".")[0] for name in sys.modules}})
"""


def test_flags_are_parsed_and_plans_are_made_without_a_framework():
    """Wrong ones take no seconds until a framework is there."""
    words = [
        *([], *([name, "--help"] for name in COMMANDS), *(words for words, _ in MISTAKES)),
        ["plan", *RUN, "--epochs", "9", "--optimizer", "sgd"],
        ["doctor", "--tpu", "missing.py"],
        ["doctor", "train.py", "--workers", "0"],
        ["doctor", "--measure", "train.py", "--seconds", "-1"],
    ]
    ended = run_code(PARSED.format(words=words))
    loaded = {*ended.stdout.splitlines()[-1].split()}
    assert not loaded & {"keras", "tensorflow", "jax", "torch", "numpy"}
