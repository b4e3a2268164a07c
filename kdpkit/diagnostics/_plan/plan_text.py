"""Plans as text: a table with a column for each, and what was found."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kdpkit._internal import check_results
from kdpkit.diagnostics import _text

if TYPE_CHECKING:
    from kdpkit.diagnostics._plan.training_plan import TrainingPlan

_COLUMNS = 4  # that fit side by side


@dataclasses.dataclass(frozen=True)
class Plans:
    """Plans that differ in their replicas; they print in lines of at most 80 columns."""

    plans: "Sequence[TrainingPlan]"

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain values, for JSON."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def __str__(self) -> str:
        """Return the settings, the table, and the findings."""
        starts = range(0, len(self.plans), _COLUMNS)
        tables = [_table(self.plans[start : start + _COLUMNS]) for start in starts]
        return "\n\n".join([_heading(self.plans[0]), *tables, *map(str, _found(self.plans))])


def _heading(plan: "TrainingPlan") -> str:
    scale = plan.scale
    settings = [
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
    return check_results.wrapped(", ".join(settings))


def _table(plans: "Sequence[TrainingPlan]") -> str:
    columns = [dict(_numbers(plan)) for plan in plans]
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return _text.table(rows)


def _numbers(plan: "TrainingPlan") -> Iterator[tuple[str, str]]:
    scale = plan.scale
    yield "replicas", f"{scale.replicas:,}"
    yield "global batch", f"{scale.global_batch_size:,}"
    if scale.accumulation > 1:
        yield "examples per update", f"{scale.effective_batch_size:,}"
    yield "steps per epoch", f"{plan.steps_per_epoch:,}"
    yield "padded per epoch", f"{plan.padded:,}"
    yield "left out per epoch", f"{plan.left_out:,}"
    least, most = min(plan.last_batch), max(plan.last_batch)
    yield "last batch, of a replica", f"{most:,}" if least == most else f"{least:,}-{most:,}"
    yield "steps", f"{plan.total_steps:,}"
    yield "updates", f"{plan.updates:,}"
    if plan.warmup_steps:
        yield "warmup steps", f"{plan.warmup_steps:,}"
    yield "shuffle buffer", f"{plan.buffered_examples:,}"
    if plan.shuffle_buffer_bytes is not None:
        yield "  its memory", f"{plan.shuffle_buffer_bytes / 2**20:,.3g} MiB"
    yield "factor of the batch", f"{scale.factor:,}"
    yield "scaled rate", f"{scale.learning_rate:.4g}"
    for milestone in plan.milestones:
        if milestone.step:
            yield f"  {milestone.event}: step", f"{milestone.step:,}"
        yield f"  {milestone.event}: rate", f"{milestone.learning_rate:.4g}"
    if plan.adam:
        yield "Adam: beta_1", f"{plan.adam.beta_1:.6g}"
        yield "Adam: beta_2", f"{plan.adam.beta_2:.6g}"
        yield "Adam: epsilon", f"{plan.adam.epsilon:.4g}"


def _found(plans: "Sequence[TrainingPlan]") -> Iterator[check_results.Finding]:
    """Return each kind of finding once, as it is for the most replicas that have it."""
    alike: dict[tuple[str, str], list[tuple[int, check_results.Finding]]] = {}
    for plan in plans:
        for finding in plan.findings:
            of_kind = alike.setdefault((finding.rule, finding.level), [])
            of_kind.append((plan.scale.replicas, finding))
    replicas = {found[-1][1]: [str(count) for count, _ in found] for found in alike.values()}
    for finding in check_results.in_order(replicas):
        where = f"{finding.where} (replicas: {', '.join(replicas[finding])})"
        yield finding if len(plans) == 1 else dataclasses.replace(finding, where=where)
