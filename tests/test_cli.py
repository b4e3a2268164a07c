"""What all commands have in common."""

import pytest

from kdpkit import cli

COMMANDS = ("bench", "data-service", "doctor", "env", "launch", "lr", "plan", "probe")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_an_example_and_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"    kdpkit {command} ") for line in lines)


def test_every_command_is_tested_here(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    said = capsys.readouterr().out
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("    ")]
    assert set(COMMANDS) <= set(listed)
    assert len(COMMANDS) == len(cli._COMMANDS)
