"""What all commands have in common."""

import sys

import pytest

import kdpkit
from kdpkit import cli
from tests.processes import run

COMMANDS = ("doctor", "env", "launch", "plan", "recipe")


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


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kdpkit {kdpkit.__version__}\n"


@pytest.mark.parametrize("backend", ["mine", "torch"])
def test_a_backend_that_cannot_be_imported_is_one_sentence(tmp_path, backend):
    (tmp_path / "data.py").write_text("def numbers():\n    return range(9)\n")
    (tmp_path / "torch.py").write_text("raise ImportError('There is none.')")
    command = (sys.executable, "-m", "kdpkit", "doctor", "data.py:numbers")
    ended = run(*command, cwd=tmp_path, check=False, KERAS_BACKEND=backend)
    assert (ended.returncode, ended.stdout) == (2, "")
    last = ended.stderr.splitlines()[-1]
    assert "Keras cannot be imported with its backend" in last
    assert f"KERAS_BACKEND={backend!r}" in last
    assert "Traceback" not in ended.stderr
