"""Rules on the numbers of a plan: a rate leaves the range of its rule, or a run wastes data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from kdpkit._internal import check_results

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
        level, effect = "error", "No step is made."
        if plan.steps_per_epoch:
            level, effect = "wrong", "An update sees fewer examples than the rate is scaled for."
        remedy = f"Use at most {plan.examples:,} replicas."
        if largest:
            remedy = f"Use at most {largest:,} examples per replica, or fewer replicas."
        yield level, "batch size", f"{problem} {effect}", remedy


def _no_update(plan: "TrainingPlan") -> _Found:
    if plan.total_steps and not plan.updates:
        problem = (
            f"The run has {plan.total_steps:,} steps and ends before its first update, which takes "
            f"{plan.accumulation:,}."
        )
        remedy = "Train for more epochs, or accumulate fewer batches."
        yield "wrong", "accumulation", problem, remedy


def _long_warmup(plan: "TrainingPlan") -> _Found:
    steps, warmup = plan.total_steps, plan.warmup_steps or 0
    if steps and warmup >= steps:
        yield (
            "wrong" if plan.has_schedule else "error",
            "warmup",
            f"The warmup takes {warmup:,} steps, and the run has {steps:,}: the rate never "
            "reaches its peak.",
            f"Train for more epochs, or warm up over fewer steps: {max(steps // 20, 1):,} are "
            "a twentieth of the run.",
        )


def _linear_without_warmup(plan: "TrainingPlan") -> _Found:
    factor = plan.scale.factor
    if plan.rule == "linear" and factor > _FACTOR_WITHOUT_WARMUP and not plan.warmup_steps:
        problem = (
            f"The linear rule multiplies the rate by {factor:,} from the first step on, where "
            "training often diverges."
        )
        yield "wrong", "warmup", problem, f"Warm up first: {_GOYAL} took 5 of 90 epochs."


def _linear_large_batch(plan: "TrainingPlan") -> _Found:
    size, is_scaled = plan.scale.effective_batch_size, plan.scale.factor > 1
    if plan.rule == "linear" and is_scaled and size > _LARGEST_LINEAR_BATCH:
        problem = (
            f"An update sees {size:,} examples. {_GOYAL} found the linear rule to hold up to "
            f"{_LARGEST_LINEAR_BATCH:,}, with warmup."
        )
        remedy = "Use a smaller batch, or the rule 'sqrt', and compare with the base run."
        yield "wrong", "rule", problem, remedy


def _linear_adam(plan: "TrainingPlan") -> _Found:
    if plan.rule == "linear" and plan.scale.factor > 1 and plan.optimizer == "adam":
        problem = (
            "The linear rule is meant for SGD. Adam divides by the size of the gradients, so its "
            f"rate grows with the square root of the batch ({_MALLADI})."
        )
        yield "wrong", "rule", problem, "Use the rule 'sqrt'."


def _optimizer(plan: "TrainingPlan") -> _Found:
    if plan.rule == "linear" and plan.scale.factor > 1 and plan.optimizer is None:
        problem = "The linear rule is meant for SGD; for Adam and its variants use 'sqrt'."
        yield "note", "rule", problem, "Set the optimizer, 'sgd' or 'adam'."


def _adam_factor(plan: "TrainingPlan") -> _Found:
    if plan.adam_problem:
        yield (
            # Without a given optimizer the rate alone can still be scaled.
            "error" if plan.optimizer == "adam" else "note",
            "rule",
            f"The square-root rule has no settings for Adam here. {plan.adam_problem}",
            "Use fewer replicas or less accumulation; or scale the rate alone and keep the betas, "
            "for which nothing is proven.",
        )


def _dropped(plan: "TrainingPlan") -> _Found:
    if plan.steps_per_epoch and plan.left_out > _SHARE_LEFT_OUT * plan.examples:
        which = "others" if plan.shuffle_buffer else "the same ones"
        problem = (
            f"Each epoch leaves out {plan.left_out:,} of {plan.examples:,} examples "
            f"({plan.left_out / plan.examples:.1%}), {which} in each epoch."
        )
        yield "wrong", "last batch", problem, "Use the remainder 'pad', or smaller batches."


def _uneven_batch(plan: "TrainingPlan") -> _Found:
    if len({*plan.last_batch}) > 1:
        idle = plan.last_batch.count(0)
        none = f", and {idle} of them get no example" if idle else ""
        problem = (
            f"The replicas do not divide the last batch{none}: plain Keras weights its examples"
        )
        remedy = "Train with `kdpkit.training`, or use the remainder 'pad' or 'drop'."
        yield "note", "last batch", f"{problem} wrongly.", remedy


def _small_shuffle(plan: "TrainingPlan") -> _Found:
    fault = check_results.small_buffer(
        plan.buffered_examples, examples=plan.examples, batch_size=plan.scale.global_batch_size
    )
    if fault:
        level, problem, remedy = fault
        yield level, "shuffle buffer", problem, remedy


RULES = {
    rule.__name__[1:].replace("_", "-"): rule
    for rule in (
        *(_large_batch, _no_update, _long_warmup, _linear_without_warmup, _linear_large_batch),
        *(_linear_adam, _optimizer, _adam_factor, _dropped, _uneven_batch, _small_shuffle),
    )
}
