"""The numbers of a run on several replicas, worked out before it starts, and as a table."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from kdpkit import scaling
from kdpkit._internal import check_results, checks
from kdpkit.diagnostics import _text
from kdpkit.diagnostics._plan import rules

OPTIMIZERS = ("sgd", "adam")

_NUMBERS = ("steps_per_epoch", "left_out", "total_steps", "warmup_steps")
_COLUMNS = 4  # plans that fit side by side


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Work out the numbers of a run on several replicas, and what is wrong with them.

    `plan` is another name of this class. Nothing is trained, no device is looked for and no
    framework is loaded. Batch sizes and rates are those of `kdpkit.scaling.ScalePlan`.

    >>> small = plan(
    ...     examples=60_000, per_replica_batch_size=32, base_learning_rate=0.1, replicas=8, epochs=5
    ... )
    >>> small.scale.global_batch_size, small.steps_per_epoch, small.left_out, small.total_steps
    (256, 234, 96, 1170)

    Args:
        examples: Number of training examples, all replicas together.
        per_replica_batch_size: Examples that one replica takes from each batch.
        base_learning_rate: Rate for a batch of one replica.
        epochs: Passes over the examples, without those that fill no batch.
        replicas: Number of replicas that train in step.
        rule: How the rate grows with the batch: `"linear"`, `"sqrt"` or `"none"`.
        optimizer: `"sgd"`, or `"adam"` for Adam and its variants. None leaves it open.
        warmup_epochs: Epochs of linear warmup from 0, also parts of one.

    Raises:
        ValueError: A number out of its range. What a longer run, or fewer replicas, would fix is a
            finding.
    """

    examples: int
    per_replica_batch_size: int
    base_learning_rate: float
    epochs: int = 1
    replicas: int = 1
    rule: str = "linear"
    optimizer: str | None = None
    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        for name in ("examples", "epochs"):
            checks.integer(name, getattr(self, name))
        checks.number("learning_rate", self.scale.learning_rate)  # of many replicas, infinite
        checks.number("warmup_epochs", self.warmup_epochs, minimum=0, below=self.epochs)
        checks.one_of("optimizer", self.optimizer, (None, *OPTIMIZERS))

    @functools.cached_property
    def scale(self) -> scaling.ScalePlan:
        """Batch sizes and the scaled rate."""
        return scaling.ScalePlan(
            replicas=self.replicas,
            per_replica_batch_size=self.per_replica_batch_size,
            base_learning_rate=self.base_learning_rate,
            rule=self.rule,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch; 0 where there are too few examples for one."""
        return self.examples // self.scale.global_batch_size

    @property
    def left_out(self) -> int:
        """Examples of each epoch that are in no batch."""
        return self.examples % self.scale.global_batch_size

    @property
    def total_steps(self) -> int:
        """Global batches of the run, which is what a schedule counts."""
        return self.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        """Steps of the warmup, fewer than there are."""
        return min(round(self.warmup_epochs * self.steps_per_epoch), max(self.total_steps - 1, 0))

    @property
    def findings(self) -> tuple[check_results.Finding, ...]:
        """Where a rule leaves its range, or the run wastes data; the worst first."""
        return check_results.found(rules.RULES, self)

    @property
    def clean(self) -> bool:
        """Whether there are only notes."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        return str(Plans([self]))

    def to_dict(self) -> dict[str, Any]:
        """Return settings and numbers as plain values, for JSON."""
        return {
            "clean": self.clean,
            **dataclasses.asdict(self),
            "global_batch_size": self.scale.global_batch_size,
            "learning_rate": self.scale.learning_rate,
            **{name: getattr(self, name) for name in _NUMBERS},
            "findings": check_results.as_dicts(self.findings),
        }


plan = TrainingPlan


@dataclasses.dataclass(frozen=True)
class Plans:
    """Plans that differ in their replicas; they print in lines of at most 80 columns."""

    plans: Sequence[TrainingPlan]

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain values, for JSON."""
        return {"plans": [plan.to_dict() for plan in self.plans]}

    def __str__(self) -> str:
        """Return the settings, the table, and the findings."""
        starts = range(0, len(self.plans), _COLUMNS)
        tables = [_table(self.plans[start : start + _COLUMNS]) for start in starts]
        return "\n\n".join([_heading(self.plans[0]), *tables, *map(str, self._found())])

    def _found(self) -> Iterator[check_results.Finding]:
        """Return each kind of finding once, as it is for the most replicas that have it."""
        alike: dict[tuple[str, str], list[tuple[int, check_results.Finding]]] = {}
        for plan in self.plans:
            for finding in plan.findings:
                alike.setdefault((finding.rule, finding.level), []).append((plan.replicas, finding))
        replicas = {found[-1][1]: [str(count) for count, _ in found] for found in alike.values()}
        for finding in check_results.in_order(replicas):
            where = f"{finding.where} (replicas: {checks.listed(replicas[finding])})"
            yield finding if len(self.plans) == 1 else dataclasses.replace(finding, where=where)


def _heading(plan: TrainingPlan) -> str:
    settings = [
        f"{plan.examples:,} examples",
        f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}",
        f"{plan.per_replica_batch_size:,} examples per replica",
        f"base rate {plan.base_learning_rate:g}",
        f"rule {plan.rule}",
        *([f"optimizer {plan.optimizer}"] if plan.optimizer else []),
    ]
    return check_results.wrapped(", ".join(settings))


def _table(plans: Sequence[TrainingPlan]) -> str:
    columns = [_numbers(plan) for plan in plans]
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    return _text.table([(name, *(column.get(name, "-") for column in columns)) for name in names])


def _numbers(plan: TrainingPlan) -> dict[str, str]:
    scale = plan.scale
    found: dict[str, str | int] = {
        "replicas": plan.replicas,
        "global batch": scale.global_batch_size,
        "steps per epoch": plan.steps_per_epoch,
        "left out per epoch": plan.left_out,
        "steps": plan.total_steps,
        **({"warmup steps": plan.warmup_steps} if plan.warmup_steps else {}),
        "scaled rate": f"{scale.learning_rate:.4g}",
    }
    return {name: f"{n:,}" if isinstance(n, int) else n for name, n in found.items()}
