"""Contestants measured alternately in one process, and their figures compared."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Measure = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some figures, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Summarize at least one figure."""
        if len(values) == 1:
            return cls(*values * 3)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        unit: Of `ours` and `other`.
        ours: Our figure.
        other: What it is held against, if anything.
        ratio: Of our figure to the other, taken round by round.
        goal: `(">=", 5.5)` or `("<=", 1.1)`, of the ratio, or of our figure where nothing else is.
        note: What a reader must know.
    """

    what: str
    unit: str
    ours: Spread
    other: Spread | None = None
    ratio: Spread | None = None
    goal: tuple[str, float] | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        relation, bound = self.goal
        value = (self.ratio or self.ours).median
        return value >= bound if relation == ">=" else value <= bound


def in_turns(contestants: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Measure all in every round, each round beginning with another; a first round warms up."""
    names = [*contestants]
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            figure = contestants[name]()
            if number:
                figures[name].append(figure)
    return figures


def seconds_of(call: Callable[[], object]) -> float:
    """Time a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compared(
    what: str,
    unit: str,
    ours: list[float],
    other: list[float],
    *,
    goal: tuple[str, float] | None = None,
    note: str = "",
) -> Row:
    """Put two columns of figures, round by round, into a row."""
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    return Row(what, unit, Spread.of(ours), Spread.of(other), Spread.of(ratios), goal, note)


def row_of(values: dict[str, Any]) -> Row:
    """Make a row from its JSON."""
    spreads = {name: values[name] and Spread(**values[name]) for name in ("ours", "other", "ratio")}
    rest = {name: value for name, value in values.items() if name != "is_met"}
    return Row(**{**rest, **spreads, "goal": values["goal"] and tuple(values["goal"])})


def table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown, and the notes below it."""
    lines = [
        "| what | unit | ours | other | ratio (quartiles) | goal |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = (
            row.ratio and f"{row.ratio.median:.3g} ({row.ratio.low:.3g} to {row.ratio.high:.3g})"
        )
        goal = row.goal and f"{row.goal[0]} {row.goal[1]:g}{'' if row.is_met else ', missed'}"
        cells = (row.what, row.unit, figure(row.ours), figure(row.other), ratio or "", goal or "")
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"{row.what}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, "", *notes]).rstrip()


def figure(spread: Spread | None) -> str:
    """Return a median with three digits or more."""
    if spread is None:
        return ""
    return f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.3g}"
