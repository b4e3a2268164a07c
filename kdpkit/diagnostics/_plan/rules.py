"""Findings on the numbers of a plan: where a rule leaves its range, or the run wastes data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdpkit._internal import shuffle_buffer
from kdpkit._internal.check_results import Finding, in_order

if TYPE_CHECKING:
    from kdpkit.diagnostics._plan.training_plan import TrainingPlan

_FACTOR_WITHOUT_WARMUP = 8  # a rate that grows more at once is where Goyal et al. 2017 warm up
_LARGEST_LINEAR_BATCH = 8192  # to which they hold the linear rule
_SHARE_LEFT_OUT = 0.05
_GOYAL = "Goyal et al. 2017 (arXiv:1706.02677)"
_MALLADI = "Malladi et al. 2022 (arXiv:2205.10287)"


def findings_on(plan: "TrainingPlan") -> tuple[Finding, ...]:
    """Return the findings on a plan, the worst first."""
    rules = (_batches, _length, _linear_rule, _adam, _last_batch, _shuffling)
    return in_order(finding for rule in rules for finding in rule(plan))


def _batches(plan: "TrainingPlan") -> Iterator[Finding]:
    size = plan.scale.global_batch_size
    if plan.examples >= size:
        return
    problem = f"A global batch of {size:,} is larger than the data: {plan.examples:,} examples."
    largest = plan.examples // plan.scale.replicas
    remedy = (
        f"Use at most {largest:,} examples per replica, or fewer replicas."
        if largest
        else f"Use at most {plan.examples:,} replicas."
    )
    if plan.steps_per_epoch:
        level, effect = "wrong", "An update sees fewer examples than the rate is scaled for."
    else:
        level, effect = "error", "No step is made."
    yield Finding("large-batch", level, "batch size", f"{problem} {effect}", remedy)


def _length(plan: "TrainingPlan") -> Iterator[Finding]:
    steps, accumulation, warmup = plan.total_steps, plan.scale.accumulation, plan.warmup_steps
    if not steps:
        return
    if not plan.updates:
        yield Finding(
            "no-update",
            "wrong",
            "accumulation",
            f"The run has {steps:,} steps and ends before its first update, which takes "
            f"{accumulation:,}.",
            "Train for more epochs, or accumulate fewer batches.",
        )
    if warmup >= steps:
        yield Finding(
            "long-warmup",
            "wrong" if plan.has_schedule else "error",
            "warmup",
            f"The warmup takes {warmup:,} steps, and the run has {steps:,}: the rate never "
            "reaches its peak.",
            f"Train for more epochs, or warm up over fewer steps: {max(steps // 20, 1):,} are "
            "a twentieth of the run.",
        )
    elif not plan.has_schedule:
        yield Finding(
            "long-decay",
            "error",
            "decay",
            f"Warmup and decay take {warmup + plan.decay_steps:,} steps, and the run has "
            f"{steps:,}.",
            f"Decay over at most {steps - warmup:,} steps, or train for more epochs.",
        )


def _linear_rule(plan: "TrainingPlan") -> Iterator[Finding]:
    scale = plan.scale
    if scale.rule != "linear" or scale.factor == 1:
        return
    if scale.factor > _FACTOR_WITHOUT_WARMUP and not plan.warmup_steps:
        yield Finding(
            "linear-without-warmup",
            "wrong",
            "warmup",
            f"The linear rule multiplies the rate by {scale.factor:,} from the first step on, "
            "where training often diverges.",
            f"Warm up first: {_GOYAL} took 5 of 90 epochs.",
        )
    if scale.effective_batch_size > _LARGEST_LINEAR_BATCH:
        yield Finding(
            "linear-large-batch",
            "wrong",
            "rule",
            f"An update sees {scale.effective_batch_size:,} examples. {_GOYAL} found the linear "
            f"rule to hold up to {_LARGEST_LINEAR_BATCH:,}, with warmup.",
            "Use a smaller batch, or the rule 'sqrt', and compare with the base run.",
        )
    if plan.optimizer == "adam":
        yield Finding(
            "linear-adam",
            "wrong",
            "rule",
            "The linear rule is meant for SGD. Adam divides by the size of the gradients, so its "
            f"rate grows with the square root of the batch ({_MALLADI}).",
            "Use the rule 'sqrt'.",
        )
    if plan.optimizer is None:
        yield Finding(
            "optimizer",
            "note",
            "rule",
            "The linear rule is meant for SGD; for Adam and its variants use 'sqrt'.",
            "Set the optimizer, 'sgd' or 'adam'.",
        )


def _adam(plan: "TrainingPlan") -> Iterator[Finding]:
    if plan.adam_problem:
        yield Finding(
            "adam-factor",
            # Without a given optimizer the rate alone can still be scaled.
            "error" if plan.optimizer == "adam" else "note",
            "rule",
            f"The square-root rule has no settings for Adam here. {plan.adam_problem}",
            "Use fewer replicas or less accumulation; or scale the rate alone and keep the betas, "
            "for which nothing is proven.",
        )


def _last_batch(plan: "TrainingPlan") -> Iterator[Finding]:
    if plan.steps_per_epoch and plan.left_out > _SHARE_LEFT_OUT * plan.examples:
        which = "others" if plan.shuffle_buffer else "the same ones"
        yield Finding(
            "dropped",
            "wrong",
            "last batch",
            f"Each epoch leaves out {plan.left_out:,} of {plan.examples:,} examples "
            f"({plan.left_out / plan.examples:.1%}), {which} in each epoch.",
            "Use the remainder 'pad', or smaller batches.",
        )
    if len({*plan.last_batch}) > 1:
        idle = plan.last_batch.count(0)
        yield Finding(
            "uneven-batch",
            "note",
            "last batch",
            "The replicas do not divide the last batch"
            + (f", and {idle} of them get no example" if idle else "")
            + ": plain Keras weights its examples wrongly.",
            "Train with `kdpkit.training`, or use the remainder 'pad' or 'drop'.",
        )


def _shuffling(plan: "TrainingPlan") -> Iterator[Finding]:
    fault = shuffle_buffer.fault(
        plan.buffered_examples, examples=plan.examples, batch_size=plan.scale.global_batch_size
    )
    if fault:
        level, problem, remedy = fault
        yield Finding("small-shuffle", level, "shuffle buffer", problem, remedy)
