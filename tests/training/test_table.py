"""The tables of exactness are those of the settings, and keep what they promise."""

import pathlib
import re

import pytest

import kdpkit
from tests.training import exactness

DOCS = pathlib.Path(kdpkit.__file__).parent.parent / "docs"
PAGE = DOCS / "explanation" / "exactness_tables.md"
OURS = [column for column in exactness.COLUMNS if "stock" not in column]


def table(backend):
    """Return a backend's cells by setting and column."""
    columns = exactness.columns_on(backend)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    start = rows.index(["setting", *columns])
    found = {}
    for name, *cells in rows[start + 2 :]:
        if len(cells) != len(columns):
            break
        found[name] = dict(zip(columns, cells, strict=True))
    return found


@pytest.mark.parametrize("backend", exactness.REPLICAS)
def test_every_setting_is_a_row(backend):
    assert [*table(backend)] == [setting.name for setting in exactness.SETTINGS]


@pytest.mark.parametrize("column", OURS)
def test_our_cells_are_what_the_settings_promise(column):
    cells = table(exactness.backend_of(column))
    for setting in exactness.SETTINGS:
        cell = cells[setting.name][column]
        verdict, number = re.fullmatch(r"(\D+?)(?: (\d\S*))?", cell).groups()
        assert verdict == setting.promise_in(column), setting.name
        if verdict.startswith("equal"):
            assert float(number) <= 10 * setting.tolerance
