"""The numbers of a run on several replicas, worked out before it starts, and as a table."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from kdpkit import scaling
from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding

OPTIMIZERS = ("sgd", "adam")

_FACTOR_WITHOUT_WARMUP = 8  # a rate that grows more at once is where Goyal et al. 2017 warm up
_SHARE_LEFT_OUT = 0.05
_GOYAL = "Goyal et al. 2017 (arXiv:1706.02677)"
_MALLADI = "Malladi et al. 2022 (arXiv:2205.10287)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Work out the numbers of a run on several replicas, and what is wrong with them.

    `plan` is another name of this class. No framework is loaded. Batch sizes and rates are those of
    `kdpkit.scaling.ScalePlan`.

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
    def findings(self) -> tuple[Finding, ...]:
        """Where a rule leaves its range, or the run wastes data; the worst first."""
        return check_results.in_order(_findings(self))

    @property
    def clean(self) -> bool:
        """Whether there are only notes."""
        return check_results.are_notes(self.findings)

    def __str__(self) -> str:
        """Return lines of at most 80 columns."""
        return printed([self])


plan = TrainingPlan
"""Work out the numbers of a run on several replicas: `TrainingPlan` has the arguments."""


def _findings(plan: TrainingPlan) -> Iterator[Finding]:
    if not plan.steps_per_epoch:
        size, each = plan.scale.global_batch_size, plan.examples // plan.replicas
        problem = f"A global batch of {size:,} is larger than the data: {plan.examples:,} examples."
        remedy = f"Use at most {plan.examples:,} replicas."
        if each:
            remedy = f"Use at most {each:,} examples per replica, or fewer replicas."
        yield Finding("large-batch", "error", "batch size", f"{problem} No step is made.", remedy)
    elif plan.left_out > _SHARE_LEFT_OUT * plan.examples:
        problem = (
            f"Each epoch leaves out {plan.left_out:,} of {plan.examples:,} examples "
            f"({plan.left_out / plan.examples:.1%})."
        )
        remedy = (
            "Use smaller batches, or keep or pad the last (`remainder` of "
            "`pipelines.PipelineConfig` and `batches.ArrayBatches`); of arrays `fit` keeps it."
        )
        yield Finding("dropped", "wrong", "last batch", problem, remedy)
    if plan.rule != "linear":
        return
    if plan.replicas > _FACTOR_WITHOUT_WARMUP and not plan.warmup_steps:
        problem = (
            f"The linear rule multiplies the rate by {plan.replicas:,} from the first step on, "
            "where training often diverges."
        )
        remedy = f"Warm up first: {_GOYAL} took 5 of 90 epochs."
        yield Finding("linear-without-warmup", "wrong", "warmup", problem, remedy)
    if plan.replicas > 1 and plan.optimizer == "adam":
        problem = (
            "The linear rule is meant for SGD. Adam divides by the size of the gradients, so its "
            f"rate grows with the square root of the batch ({_MALLADI})."
        )
        yield Finding("linear-adam", "wrong", "rule", problem, "Use the rule 'sqrt'.")


def printed(plans: Sequence[TrainingPlan]) -> str:
    """Return a line for each of some plans that differ in their replicas, and what is found."""
    heading = ("replicas", "global batch", "steps per epoch", "left out", "steps", "warmup", "rate")
    return "\n\n".join(
        [check_results.table([heading, *map(_row, plans)]), *map(str, _found(plans))]
    )


def _row(plan: TrainingPlan) -> tuple[str, ...]:
    steps = plan.steps_per_epoch, plan.left_out, plan.total_steps, plan.warmup_steps
    numbers = (plan.replicas, plan.scale.global_batch_size, *steps)
    return *(f"{number:,}" for number in numbers), f"{plan.scale.learning_rate:.4g}"


def _found(plans: Sequence[TrainingPlan]) -> Iterator[Finding]:
    """Yield each kind of finding once, as it is for the most replicas that have it."""
    last: dict[str, Finding] = {}
    replicas: dict[str, list[int]] = {}
    for plan in plans:
        for finding in plan.findings:
            last[finding.rule] = finding
            replicas.setdefault(finding.rule, []).append(plan.replicas)
    for finding in check_results.in_order(last.values()):
        where = f"{finding.where} (replicas: {checks.listed(replicas[finding.rule])})"
        yield dataclasses.replace(finding, where=where)
