"""The steps of a run that say most about its learning rate."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdpkit import _checks

MOST_STEPS = 2**31 - 1  # JAX counts an optimizer's steps in int32


@dataclasses.dataclass(frozen=True)
class Milestone:
    """A step of a run, what it is known for, and the rate that is applied at it.

    Attributes:
        step: As the optimizer counts them, from 0.
        event: Such as `"first"` or `"end of warmup"`.
        learning_rate: The float32 rate, in the fewest digits that tell it.
    """

    step: int
    event: str
    learning_rate: float


def countable(name: str, steps: Any) -> int:
    """Accept a number of steps that every backend can count; behind it rates would be wrong."""
    if steps > MOST_STEPS:
        _checks.refuse(
            f"Rates are computed for {MOST_STEPS:,} steps at most, which is what JAX counts to.",
            **{name: steps},
        )
    return int(steps)


def at(schedule: Any, events: Sequence[tuple[int, str]]) -> tuple[Milestone, ...]:
    """Give the rates at steps that stand for something; for a constant rate nothing is loaded.

    >>> at(0.5, [(0, "first"), (9, "last")])[1]
    Milestone(step=9, event='last', learning_rate=0.5)

    Args:
        schedule: A schedule, or a number for a constant rate.
        events: Steps, and what each stands for.
    """
    steps = [step for step, _ in events]
    return tuple(
        Milestone(step, event, rate)
        for (step, event), rate in zip(events, _rates(schedule, steps), strict=True)
    )


def as_dicts(milestones: Sequence[Milestone]) -> list[dict[str, Any]]:
    """Give the milestones as plain values, for JSON."""
    return [dataclasses.asdict(milestone) for milestone in milestones]


def _rates(schedule: Any, steps: list[int]) -> list[float]:
    if isinstance(schedule, (int, float)):
        return [float(schedule)] * len(steps)
    from kdpkit import schedules  # loads Keras

    return shortest(schedules.preview(schedule, steps))


def shortest(rates: Any) -> list[float]:
    """Give float32 rates as Python's floats of the fewest digits: 0.001, not 0.0010000000475."""
    return [float(str(rate)) for rate in rates]
