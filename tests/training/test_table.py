"""README's table of exactness is that of the settings, and keeps what they promise."""

import pathlib

import pytest

import kdpkit
from tests.training import exactness

README = pathlib.Path(kdpkit.__file__).parent.parent / "README.md"
COLUMNS = ["stock Keras", "replica_exact", "TrainingLoop"]


def table():
    """Give the cells by setting and column."""
    lines = README.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    start = rows.index(["setting", *COLUMNS])
    found = {}
    for name, *cells in rows[start + 2 :]:
        if len(cells) != len(COLUMNS):
            break
        found[name] = dict(zip(COLUMNS, cells, strict=True))
    return found


def test_every_setting_is_a_row():
    assert [*table()] == [setting.name for setting in exactness.SETTINGS]


@pytest.mark.parametrize("column", COLUMNS[1:])
def test_our_cells_are_what_the_settings_promise(column):
    for setting in exactness.SETTINGS:
        cell = table()[setting.name][column]
        assert cell.startswith(setting.promise_in(column)), setting.name
        assert "wrong" not in cell
        assert "crash" not in cell
        if cell.startswith("equal"):
            assert float(cell.split()[1]) <= 10 * setting.tolerance
