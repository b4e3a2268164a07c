"""Plans as text: a table with a column for each, and what was found."""

import dataclasses
import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kdpkit import _findings

if TYPE_CHECKING:
    from kdpkit.diagnostics._plan import TrainingPlan

_WIDTH = 80
_COLUMNS = 4  # that fit beside each other
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def of(plans: "Sequence[TrainingPlan]") -> str:
    """Say plans that differ in their replicas, in lines of at most 80 columns."""
    starts = range(0, len(plans), _COLUMNS)
    tables = [_table(plans[start : start + _COLUMNS]) for start in starts]
    return "\n\n".join([_heading(plans[0]), *tables, *map(str, _found(plans))])


def _heading(plan: "TrainingPlan") -> str:
    scale = plan.scale
    said = [
        f"{plan.examples:,} examples",
        f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}",
        f"{scale.per_replica_batch_size:,} examples per replica",
        f"base rate {scale.base_learning_rate:g}",
        f"rule {scale.rule}",
        f"shape {plan.shape}",
        f"remainder {plan.remainder}",
        *([f"{scale.accumulation:,} batches per update"] if scale.accumulation > 1 else []),
        *([f"optimizer {plan.optimizer}"] if plan.optimizer else []),
    ]
    return textwrap.fill(", ".join(said), _WIDTH)


def _table(plans: "Sequence[TrainingPlan]") -> str:
    from rich import box, console, table

    grid = table.Table(box=box.SIMPLE_HEAD, show_header=True, pad_edge=False)
    grid.add_column("replicas")
    for plan in plans:
        grid.add_column(f"{plan.scale.replicas:,}", justify="right")
    columns = [dict(_numbers(plan)) for plan in plans]
    rows = dict.fromkeys(itertools.chain.from_iterable(columns))
    for row in rows:
        grid.add_row(row, *(column.get(row, "-") for column in columns))
    written = io.StringIO()
    console.Console(file=written, width=_WIDTH, color_system=None).print(grid)
    return "\n".join(line[1:].rstrip() for line in written.getvalue().splitlines() if line.strip())


def _numbers(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    yield from _counts(plan)
    yield from _memory(plan)
    yield from _rates(plan)


def _counts(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    scale = plan.scale
    yield "global batch", f"{scale.global_batch_size:,}"
    if scale.accumulation > 1:
        yield "examples per update", f"{scale.effective_batch_size:,}"
    yield "steps per epoch", f"{plan.steps_per_epoch:,}"
    if plan.remainder == "pad":
        yield "rows padded per epoch", f"{plan.padded:,}"
    if plan.remainder == "drop":
        yield "left out per epoch", f"{plan.left_out:,}"
    yield "last batch, of a replica", _runs(plan.last_batch)
    yield "steps in all", f"{plan.total_steps:,}"
    yield "updates in all", f"{plan.updates:,}"
    if plan.warmup_steps:
        yield "warmup steps", f"{plan.warmup_steps:,}"


def _runs(pieces: Sequence[int]) -> str:
    """Say sizes that follow each other: `"3 (x3), 1"` for 3, 3, 3, 1."""
    runs = [(size, len([*alike])) for size, alike in itertools.groupby(pieces)]
    return ", ".join(f"{size:,}" + f" (x{count:,})" * (count > 1) for size, count in runs)


def _memory(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    yield "shuffle buffer", f"{plan.buffered_examples:,}"
    if plan.shuffle_buffer_bytes is not None:
        yield "  its memory", _bytes(plan.shuffle_buffer_bytes)


def _bytes(count: float) -> str:
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def _rates(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    yield "factor of the batch", f"{plan.scale.factor:,}"
    yield "scaled rate", f"{plan.scale.learning_rate:.4g}"
    for milestone in plan.milestones:
        if milestone.step:
            yield f"  {milestone.event}: step", f"{milestone.step:,}"
        yield f"  {milestone.event}: rate", f"{milestone.learning_rate:.4g}"
    if plan.adam:
        yield "Adam: beta_1", f"{plan.adam.beta_1:.6g}"
        yield "Adam: beta_2", f"{plan.adam.beta_2:.6g}"
        yield "Adam: epsilon", f"{plan.adam.epsilon:.4g}"


def _found(plans: "Sequence[TrainingPlan]") -> Iterator[Any]:
    """Give each kind of finding once, as it is for the most replicas that it is made of."""
    alike: dict[tuple[str, str], list[tuple[int, _findings.Finding]]] = {}
    for plan in plans:
        for finding in plan.findings:
            alike.setdefault((finding.rule, finding.level), []).append(
                (plan.scale.replicas, finding)
            )
    found = {finding[-1][1]: [replicas for replicas, _ in finding] for finding in alike.values()}
    for finding in _findings.in_order(found):
        yield finding if len(plans) == 1 else _with_replicas(finding, found[finding])


def _with_replicas(finding: _findings.Finding, replicas: list[int]) -> _findings.Finding:
    *others, last = replicas
    also = f", also {', '.join(map(str, others))}" if others else ""
    return dataclasses.replace(finding, where=f"{finding.where} (R = {last}{also})")
