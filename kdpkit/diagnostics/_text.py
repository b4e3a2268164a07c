"""Tables and errors as text: what the reports have in common."""

import textwrap
from collections.abc import Sequence

from kdpkit._internal import checks

_LONGEST_REASON = 300  # characters


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a line for each row, with columns as wide as their longest cell.

    >>> print(table([("replicas", "steps"), ("1", "1,000")]))
    replicas  steps
    1         1,000
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [f"{name:{widths[0]}}", *map(str.rjust, numbers, widths[1:])]
        lines.append("  ".join(cells).rstrip())
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
