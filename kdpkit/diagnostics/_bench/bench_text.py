"""What `bench` found as text: a table of 80 columns, and what follows from it."""

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kdpkit.diagnostics import _text

if TYPE_CHECKING:
    from kdpkit.diagnostics._bench.benchmark import BenchReport, BenchRow

_HEAD = ("replicas", "each", "global", "steps/s", "(quartiles)", "examples/s", "efficiency", "GiB")
_GAIN = 1.1  # of speed, below which replicas gain nothing
_ENOUGH = 0.95  # of the best speed
_UNSTEADY = 0.25  # between the quartiles, over the median


def table(rows: "Sequence[BenchRow]") -> str:
    """Return the table, with reasons beneath their rows."""
    reasons = ["", *(row.reason for row in rows)]
    return _text.table([_HEAD, *map(_cells, rows)], left=(3, 4), notes=reasons)


def _cells(row: "BenchRow") -> tuple[str, ...]:
    sizes = (row.replicas, row.per_replica_batch_size, row.global_batch_size)
    begin = ["-" if size is None else _number(size) for size in sizes]
    if row.steps_per_second is None or row.examples_per_second is None:
        return (*begin, row.result, "", "", "", "")
    low, high = row.quartiles
    return (
        *begin,
        _number(row.steps_per_second),
        f"({_number(low)}-{_number(high)})",
        _number(row.examples_per_second),
        "-" if row.efficiency is None else f"{row.efficiency:.0%}",
        "-" if row.peak_memory_gib is None else f"{row.peak_memory_gib:.1f}",
    )


def _number(value: float) -> str:
    """Return three digits, or all of a number up to a million.

    >>> [_number(value) for value in (0.01234, 1.234, 1234.5, 4096, 12345678)]
    ['0.0123', '1.23', '1,234', '4,096', '1.23e+07']
    """
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def verdict(report: "BenchReport") -> str:
    """Return which batch is the fastest, and what replicas gain, in sentences."""
    if not any(row.is_measured for row in report.rows):
        return "Nothing could be measured."
    return " ".join([*_of_sizes(report), *_of_replicas(report), *_of_noise(report)])


def _of_sizes(report: "BenchReport") -> Iterator[str]:
    """Compare batch sizes on one device."""
    speeds = {
        row.global_batch_size: row.examples_per_second
        for row in report.rows
        if row.replicas == 1 and row.examples_per_second and row.global_batch_size
    }
    if not speeds:
        return
    best = max(speeds, key=lambda size: speeds[size])
    what = "per-replica batch" if report.scaling == "weak" else "global batch"
    yield (
        f"On one device a {what} of {best:,} trains {_number(speeds[best])} examples/s, the most "
        "of those tried."
    )
    near = [size for size in speeds if size < best and speeds[size] >= _ENOUGH * speeds[best]]
    if near:
        yield f"One of {min(near):,} reaches {speeds[min(near)] / speeds[best]:.0%} of that."


def _of_replicas(report: "BenchReport") -> Iterator[str]:
    """Compare the most replicas with one device, at the size where they are the fastest."""
    several = [row for row in report.rows if row.replicas > 1 and row.efficiency is not None]
    if not several:
        return
    row = max(several, key=lambda row: (row.replicas, row.examples_per_second or 0.0))
    gain = row.replicas * (row.efficiency or 0.0)
    cores = "" if report.accelerators else ", which share the same cores,"
    nothing = ": nothing is gained" if gain < _GAIN else ""
    yield (
        f"{row.replicas} replicas with {row.per_replica_batch_size:,} examples each{cores} train "
        f"{gain:.2f} times as fast as one device{nothing}."
    )


def _of_noise(report: "BenchReport") -> Iterator[str]:
    spreads = [
        (row.quartiles[1] - row.quartiles[0]) / row.steps_per_second
        for row in report.rows
        if row.steps_per_second
    ]
    if (spread := statistics.median(spreads)) > _UNSTEADY:
        yield (
            f"But the speed varied by {spread:.0%} between rounds, as on a machine with other "
            "work: measure again when it is idle."
        )
