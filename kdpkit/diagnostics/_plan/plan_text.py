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
    settings = [
        f"{plan.examples:,} examples",
        f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}",
        f"{plan.per_replica_batch_size:,} examples per replica",
        f"base rate {plan.base_learning_rate:g}",
        f"rule {plan.rule}, shape {plan.shape}, remainder {plan.remainder}",
        *([f"{plan.accumulation:,} batches per update"] if plan.accumulation > 1 else []),
        *([f"optimizer {plan.optimizer}"] if plan.optimizer else []),
    ]
    return check_results.wrapped(", ".join(settings))


def _table(plans: "Sequence[TrainingPlan]") -> str:
    columns = [_numbers(plan) for plan in plans]
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return _text.table(rows)


def _numbers(plan: "TrainingPlan") -> dict[str, str]:
    scale, adam = plan.scale, plan.adam
    least, most = min(plan.last_batch), max(plan.last_batch)
    found: dict[str, str | int] = {
        "replicas": plan.replicas,
        "global batch": scale.global_batch_size,
        **({"examples per update": scale.effective_batch_size} if plan.accumulation > 1 else {}),
        "steps per epoch": plan.steps_per_epoch,
        "padded per epoch": plan.padded,
        "left out per epoch": plan.left_out,
        "last batch, of a replica": most if least == most else f"{least:,}-{most:,}",
        "steps": plan.total_steps,
        "updates": plan.updates,
        **({"warmup steps": plan.warmup_steps} if plan.warmup_steps else {}),
        "shuffle buffer": plan.buffered_examples,
        "factor of the batch": scale.factor,
        "scaled rate": f"{scale.learning_rate:.4g}",
    }
    for milestone in plan.milestones:
        if milestone.step:
            found[f"  {milestone.event}: step"] = milestone.step
        found[f"  {milestone.event}: rate"] = f"{milestone.learning_rate:.4g}"
    if adam:
        found |= {"Adam: beta_1": f"{adam.beta_1:.6g}", "Adam: beta_2": f"{adam.beta_2:.6g}"}
        found["Adam: epsilon"] = f"{adam.epsilon:.4g}"
    return {name: f"{n:,}" if isinstance(n, int) else n for name, n in found.items()}


def _found(plans: "Sequence[TrainingPlan]") -> Iterator[check_results.Finding]:
    """Return each kind of finding once, as it is for the most replicas that have it."""
    alike: dict[tuple[str, str], list[tuple[int, check_results.Finding]]] = {}
    for plan in plans:
        for finding in plan.findings:
            alike.setdefault((finding.rule, finding.level), []).append((plan.replicas, finding))
    replicas = {found[-1][1]: [str(count) for count, _ in found] for found in alike.values()}
    for finding in check_results.in_order(replicas):
        where = f"{finding.where} (replicas: {', '.join(replicas[finding])})"
        yield finding if len(plans) == 1 else dataclasses.replace(finding, where=where)
