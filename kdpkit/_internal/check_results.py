"""Findings: the form in which all of kdpkit's checks report, and how reports are printed."""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence

LEVELS = ("error", "wrong", "slow", "note")
WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that a check found, and how to fix it.

    Attributes:
        rule: The short name of the check, such as `"dynamic-shape"`.
        level: `"error"`: it raises; `"wrong"`: it trains, but not what was meant; `"slow"`: it
            works, but wastes time; `"note"`: good to know.
        where: The input, layer or callback that has the problem.
        problem: What is wrong, in one or two sentences.
        remedy: How to fix it.

    >>> print(Finding("string", "error", "x", "`x` holds text.", "Look it up before."))
    error    string: x
        `x` holds text.
        Remedy: Look it up before.
    """

    rule: str
    level: str
    where: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        """Return lines of at most 80 columns, unless a word is longer."""
        return "\n".join(
            [
                wrapped(self.where, first=f"{self.level:8} {self.rule}: ", indent=9),
                wrapped(self.problem, indent=4),
                wrapped(f"Remedy: {self.remedy}", indent=4),
            ]
        )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with the worst first and without repetitions.

    >>> slow, error = (Finding("a", level, "x", "", "") for level in ("slow", "error"))
    >>> [finding.level for finding in in_order([slow, error, slow])]
    ['error', 'slow']
    """
    by_rule = sorted(dict.fromkeys(findings), key=dataclasses.astuple)
    return tuple(sorted(by_rule, key=lambda finding: LEVELS.index(finding.level)))


def are_notes(findings: Iterable[Finding]) -> bool:
    return all(finding.level == "note" for finding in findings)


def wrapped(text: str, *, indent: int = 0, first: str | None = None) -> str:
    """Break a text into lines of at most 80 columns; the first one begins with `first`."""
    space = " " * indent
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=space if first is None else first,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
