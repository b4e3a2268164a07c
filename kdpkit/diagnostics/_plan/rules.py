"""Rules on the numbers of a plan: a rate leaves the range of its rule, or a run wastes data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kdpkit.diagnostics._plan.training_plan import TrainingPlan

_FACTOR_WITHOUT_WARMUP = 8  # a rate that grows more at once is where Goyal et al. 2017 warm up
_LARGEST_LINEAR_BATCH = 8192  # to which they hold the linear rule
_SHARE_LEFT_OUT = 0.05
_GOYAL = "Goyal et al. 2017 (arXiv:1706.02677)"
_MALLADI = "Malladi et al. 2022 (arXiv:2205.10287)"

_Found: TypeAlias = Iterator[tuple[str, str, str, str]]  # level, where, problem, remedy


def _large_batch(plan: "TrainingPlan") -> _Found:
    size, largest = plan.scale.global_batch_size, plan.examples // plan.replicas
    if plan.examples < size:
        problem = f"A global batch of {size:,} is larger than the data: {plan.examples:,} examples."
        remedy = f"Use at most {plan.examples:,} replicas."
        if largest:
            remedy = f"Use at most {largest:,} examples per replica, or fewer replicas."
        yield "error", "batch size", f"{problem} No step is made.", remedy


def _linear_without_warmup(plan: "TrainingPlan") -> _Found:
    factor = plan.replicas
    if plan.rule == "linear" and factor > _FACTOR_WITHOUT_WARMUP and not plan.warmup_steps:
        problem = (
            f"The linear rule multiplies the rate by {factor:,} from the first step on, where "
            "training often diverges."
        )
        yield "wrong", "warmup", problem, f"Warm up first: {_GOYAL} took 5 of 90 epochs."


def _linear_large_batch(plan: "TrainingPlan") -> _Found:
    size, is_scaled = plan.scale.global_batch_size, plan.replicas > 1
    if plan.rule == "linear" and is_scaled and size > _LARGEST_LINEAR_BATCH:
        problem = (
            f"An update sees {size:,} examples. {_GOYAL} found the linear rule to hold up to "
            f"{_LARGEST_LINEAR_BATCH:,}, with warmup."
        )
        remedy = "Use a smaller batch, or the rule 'sqrt', and compare with the base run."
        yield "wrong", "rule", problem, remedy


def _linear_adam(plan: "TrainingPlan") -> _Found:
    if plan.rule == "linear" and plan.replicas > 1 and plan.optimizer == "adam":
        problem = (
            "The linear rule is meant for SGD. Adam divides by the size of the gradients, so its "
            f"rate grows with the square root of the batch ({_MALLADI})."
        )
        yield "wrong", "rule", problem, "Use the rule 'sqrt'."


def _optimizer(plan: "TrainingPlan") -> _Found:
    if plan.rule == "linear" and plan.replicas > 1 and plan.optimizer is None:
        problem = "The linear rule is meant for SGD; for Adam and its variants use 'sqrt'."
        yield "note", "rule", problem, "Set the optimizer, 'sgd' or 'adam'."


def _dropped(plan: "TrainingPlan") -> _Found:
    if plan.steps_per_epoch and plan.left_out > _SHARE_LEFT_OUT * plan.examples:
        problem = (
            f"Each epoch leaves out {plan.left_out:,} of {plan.examples:,} examples "
            f"({plan.left_out / plan.examples:.1%})."
        )
        remedy = "Use smaller batches, or pad the last (`pipelines.PipelineConfig`)."
        yield "wrong", "last batch", problem, remedy


RULES = {
    "large-batch": _large_batch,
    "linear-without-warmup": _linear_without_warmup,
    "linear-large-batch": _linear_large_batch,
    "linear-adam": _linear_adam,
    "optimizer": _optimizer,
    "dropped": _dropped,
}
