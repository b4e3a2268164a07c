"""What `bench` found as text: a table of 80 columns, and what follows from it."""

import math
import statistics
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdpkit.diagnostics._bench import BenchReport, BenchRow

_WIDTH = 80
_MANY = 64  # replicas, for which the cost of one more is carried on
_GAIN = 1.1  # of speed, below which replicas are said to gain nothing
_ENOUGH = 0.95  # of the best speed
_POWERS = ("", "k", "M", "G", "T", "P")
_MOST = 10**8  # examples a second, from which on they are shortened
_UNSTEADY = 0.25  # between the quartiles, over the median


def of(report: "BenchReport") -> str:
    """Give the heading, the table with reasons beneath their rows, and the verdict."""
    same = {"weak": "the same rows on each replica", "strong": "the same global batch"}
    title = f"{report.workload} on {report.title}, {report.scaling} scaling: "
    return "\n".join(
        [
            textwrap.fill(title + same[report.scaling] + ".", _WIDTH),
            "",
            _line("replicas", "rows each", "global", "steps/s", "(quartiles)", "examples/s")
            + _rest("efficiency", "GiB"),
            *map(_row, report.rows),
            "",
            _wrapped(verdict(report)),
        ]
    )


def _row(row: "BenchRow") -> str:
    replicas = f"{row.replicas:,}"
    each, size = (
        "-" if rows is None else _count(rows, 10**6)
        for rows in (row.per_replica_batch_size, row.global_batch_size)
    )
    if row.steps_per_second is None or row.examples_per_second is None:
        head = _line(replicas, each, size, row.result, "", "").rstrip()
        return f"{head}\n{_wrapped(row.reason, indent=4)}"
    low, high = row.quartiles
    return _line(
        replicas,
        each,
        size,
        _number(row.steps_per_second),
        f"({_number(low)}-{_number(high)})",
        _count(row.examples_per_second, _MOST),
    ) + _rest(
        "-" if row.efficiency is None else f"{row.efficiency:.0%}",
        "-" if row.peak_memory_gib is None else f"{row.peak_memory_gib:.1f}",
    )


def _line(replicas: str, each: str, size: str, steps: str, quartiles: str, examples: str) -> str:
    sizes = f"{replicas:>8}  {each:>9}  {size:>7}"
    return f"{sizes}  {steps:>7} {quartiles:<13} {examples:>10}"


def _rest(efficiency: str, memory: str) -> str:
    return f"  {efficiency:>10} {memory:>5}"


def _number(value: float) -> str:
    """Give as many digits as matter, in five characters.

    >>> [_number(value) for value in (0.001234, 0.01234, 1.234, 123.4, 1234.5, 123456.7)]
    ['0.001', '0.012', '1.23', '123', '1234', '123k']
    """
    if value >= 10_000:
        return _short(value)
    if value < 0.001:
        return f"{value:.0e}"
    digits = 1 if value < 0.01 else 2 if value < 0.1 else 3
    return f"{value:.{digits}g}" if value < 999.5 else f"{value:.0f}"


def _count(value: float, most: int) -> str:
    """Give a whole number, shortened from some size on, or some digits of a small one.

    >>> _count(4096, 10**6), _count(1 << 20, 10**6), _count(0.5, 10**6)
    ('4,096', '1.05M', '0.5')
    """
    if value < 100:
        return _number(value)
    return f"{value:,.0f}" if value < most else _short(value)


def _short(value: float) -> str:
    value = float(f"{value:.3g}")  # first, as 999,999 is a million then
    power = min(int(math.log10(value)) // 3, len(_POWERS) - 1)
    return f"{value / 1000**power:.3g}{_POWERS[power]}"


def _wrapped(text: str, *, indent: int = 0) -> str:
    space = " " * indent
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


# The verdict.


def verdict(report: "BenchReport") -> str:
    """Say which batch is the fastest, what replicas gain, and what one more of them costs."""
    if not any(row.is_measured for row in report.rows):
        return "Nothing could be measured."
    sentences = [*_of_sizes(report), *_of_replicas(report), *_of_noise(report)]
    return " ".join(sentences)


def _of_sizes(report: "BenchReport") -> Iterator[str]:
    """Compare batch sizes on one device."""
    speeds = {
        _size(report, row): row.examples_per_second
        for row in report.rows
        if row.replicas == 1 and row.examples_per_second
    }
    if not speeds:
        return
    best = max(speeds, key=lambda size: speeds[size])
    what = "per-replica batch" if report.scaling == "weak" else "global batch"
    speed = f"{_count(speeds[best], _MOST)} examples/s"
    if len(speeds) == 1:
        yield f"One device trains {speed} with a {what} of {best:,}."
        return
    near = [size for size in speeds if size < best and speeds[size] >= _ENOUGH * speeds[best]]
    also = (
        f", and {min(near):,} gives {speeds[min(near)] / speeds[best]:.0%} of that" if near else ""
    )
    yield f"A {what} of {best:,} is the fastest on one device, {speed}{also}."


def _of_replicas(report: "BenchReport") -> Iterator[str]:
    """Compare the most replicas with one device, at the size where they are the fastest."""
    several = [row for row in report.rows if row.replicas > 1 and row.efficiency is not None]
    if not several:
        return
    most = max(row.replicas for row in several)
    row = max(
        (row for row in several if row.replicas == most),
        key=lambda row: row.examples_per_second or 0.0,
    )
    gain = most * (row.efficiency or 0.0)
    speed = f"train {gain:.2f} times as fast as one device"
    replicas = f"{most} replicas with {row.per_replica_batch_size:,} rows each"
    if gain >= _GAIN:
        yield f"{replicas} {speed} ({row.efficiency:.0%} efficiency)."
    elif report.accelerators:
        yield f"{replicas} {speed}: nothing is gained."
    elif gain > 1 / _GAIN:
        yield f"{most} replicas share the same cores: nothing is gained."
    else:
        yield f"{most} replicas share the same cores: they {speed}."
    if report.accelerators and report.scaling == "weak":
        yield _of_one_more(most, row.efficiency or 0.0, row.steps_per_second or 0.0)


def _of_one_more(replicas: int, efficiency: float, steps_per_second: float) -> str:
    """Carry the cost of a replica on, as if each added as much time to a step."""
    alone = efficiency / steps_per_second  # seconds of a step of one device with the same rows
    share = max(1 / efficiency - 1, 0.0) / (replicas - 1)
    gain = _MANY / (1 + (_MANY - 1) * share)
    return (
        f"Each one more costs {1000 * share * alone:.3g} ms of a step ({share:.1%}); at that, "
        f"{_MANY} joined as these are would train about {gain:.0f} times as fast as one."
    )


def _of_noise(report: "BenchReport") -> Iterator[str]:
    """Say whether rows can be compared, from their rounds, and from what else was measured."""
    measured = [row for row in report.rows if row.steps_per_second]
    spread = statistics.median(
        (row.quartiles[1] - row.quartiles[0]) / (row.steps_per_second or 1.0) for row in measured
    )
    speeds = [row.machine_speed for row in measured if row.machine_speed]
    change = 1 - min(speeds) / max(speeds) if speeds else 0.0
    if max(spread, change) > _UNSTEADY:
        yield (
            f"But the machine itself varied by {max(spread, change):.0%} meanwhile, as one with "
            "other work does: measure again when it is idle."
        )


def _size(report: "BenchReport", row: "BenchRow") -> int:
    size = row.per_replica_batch_size if report.scaling == "weak" else row.global_batch_size
    return size or 0
