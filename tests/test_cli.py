"""What all commands have in common."""

import pytest

from kdpkit import cli

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
