"""Reports and errors as text, and on stdout: what the commands have in common."""

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol

from kdpkit._internal import check_results, checks

_ASCII = dict.fromkeys(range(0x2801, 0x2900), "*") | {0x2800: " "}  # of braille
_LONGEST_REASON = 300  # characters


class Report(Protocol):
    """What a command prints, as text or as JSON."""

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    notes: Sequence[str] = (),
    columns: int = check_results.WIDTH,
) -> str:
    """Return a line for each row, with columns as wide as their longest cell.

    >>> print(table([("replicas", "steps"), ("1", "1,000")], notes=["", "Slow."]))
    replicas  steps
    1         1,000
        Slow.

    Args:
        rows: The heading first. A last cell that is too long for the columns is wrapped.
        left: Columns that are aligned left; the others are aligned right.
        notes: For each row a text beneath it.
        columns: Of a terminal.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            f"{cell:{'<' if index in left else '>'}{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        if len(line) > columns:
            begin = "  ".join([*cells[:-1], ""])
            line = check_results.wrapped(row[-1], first=begin, indent=len(begin))
        lines.append(line)
        if number < len(notes) and notes[number]:
            lines.append(check_results.wrapped(notes[number], indent=4))
    return "\n".join(lines)


def reason_of(error: BaseException) -> str:
    r"""Return the type and the first line of an error, shortened to fit a sentence.

    >>> reason_of(ValueError("no data\nand more"))
    'ValueError: no data'
    """
    kind = type(error).__name__
    line = checks.first_line(error).removeprefix(f"{kind}: ")
    line = textwrap.shorten(line, _LONGEST_REASON, placeholder="...")
    return kind if line == kind else f"{kind}: {line}"


def show(report: Report, *, as_json: bool) -> None:
    """Print a report, as text or as JSON; curves in ASCII where an encoding has no braille."""
    text = json.dumps(report.to_dict(), indent=2) if as_json else str(report)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_ASCII)
    sys.stdout.write(text + "\n")
