"""What a part of the run has found so far, in a file that is complete after every row."""

import dataclasses
import json
import pathlib

from tools.benchmarks.paired import Row


class Results:
    """Rows of a part, written as soon as each is known.

    Args:
        file: Where to.
        about: What else belongs to them, such as the device.
    """

    def __init__(self, file: pathlib.Path, **about: object) -> None:
        self._file = file
        self._found = {**about, "rows": [], "missing": []}
        self._write()

    def add(self, *rows: Row) -> None:
        """Add rows."""
        self._found["rows"] += [dataclasses.asdict(row) | {"is_met": row.is_met} for row in rows]
        self._write()

    def miss(self, sentence: str) -> None:
        """Note what could not be measured, and why."""
        self._found["missing"].append(sentence)
        self._write()

    def _write(self) -> None:
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(self._found, indent=2) + "\n")
        beside.replace(self._file)
