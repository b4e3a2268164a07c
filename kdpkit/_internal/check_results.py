"""What a check found: the one form in which kdpkit's checks report."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable

from kdpkit import _checks

LEVELS = ("refused", "wrong", "slow", "note")
_WIDTH = 80
_MOST_ALIKE = 8  # findings of one rule, with one remedy


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a check found, and what to do about it.

    Attributes:
        rule: The short name of what was looked for, such as `"dynamic-shape"`.
        level: `"refused"`: it stops there; `"wrong"`: it trains, but not what was meant; `"slow"`:
            it works, and wastes; `"note"`: good to know.
        where: The part that it is about: an input, a layer, a callback.
        problem: What is wrong, in one sentence or two.
        remedy: The way out.

    >>> print(Finding("string", "refused", "x", "`x` holds text.", "Look it up before."))
    refused  string: x
        `x` holds text.
        Remedy: Look it up before.
    """

    rule: str
    level: str
    where: str
    problem: str
    remedy: str

    def __post_init__(self) -> None:
        _checks.one_of("level", self.level, LEVELS)

    def __str__(self) -> str:
        """Give some lines of at most 80 columns, but for words that are longer."""
        return "\n".join(
            [
                _wrapped(f"{self.level:8} {self.rule}: {self.where}", indent=" " * 9),
                _wrapped(f"    {self.problem}", indent=" " * 4),
                _wrapped(f"    Remedy: {self.remedy}", indent=" " * 4),
            ]
        )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort the worst first, leave out what was found twice, and count what goes on and on.

    >>> slow, refused = (Finding("a", level, "x", "", "") for level in ("slow", "refused"))
    >>> [finding.level for finding in in_order([slow, refused, slow])]
    ['refused', 'slow']
    >>> many = [Finding("a", "slow", f"x[{i:02}]", "", "") for i in range(12)]
    >>> [finding.where for finding in in_order(many)][-2:]
    ['x[06]', 'x[07] and 4 more like it']
    """
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in sorted(dict.fromkeys(findings), key=_rank):
        alike.setdefault((finding.level, finding.rule, finding.remedy), []).append(finding)
    return tuple(itertools.chain.from_iterable(map(_first_ones, alike.values())))


def _first_ones(findings: list[Finding]) -> list[Finding]:
    *shown, last = findings[:_MOST_ALIKE]
    left_out = len(findings) - _MOST_ALIKE
    if left_out > 0:
        last = dataclasses.replace(last, where=f"{last.where} and {left_out} more like it")
    return [*shown, last]


def are_notes(findings: Iterable[Finding]) -> bool:
    """Tell whether none of the findings is more than a note."""
    return all(finding.level == "note" for finding in findings)


def as_dicts(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Give the findings as plain values, for JSON."""
    return [dataclasses.asdict(finding) for finding in findings]


def _rank(finding: Finding) -> tuple[int, str, str, str]:
    return LEVELS.index(finding.level), finding.rule, finding.where, finding.problem


def _wrapped(text: str, *, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,  # a path stays whole
        break_on_hyphens=False,
    )
