"""The steps of a run at which its learning rate changes its course, and the rates there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdpkit._internal import checks

MOST_STEPS = 2**31 - 1  # JAX counts an optimizer's steps in int32


@dataclasses.dataclass(frozen=True)
class Milestone:
    """A step of a run, what happens there, and the rate that is applied at it.

    Attributes:
        step: As the optimizer counts them, from 0.
        event: Such as `"first"` or `"end of warmup"`.
        learning_rate: The float32 rate, in the fewest digits that identify it.
    """

    step: int
    event: str
    learning_rate: float


def countable(name: str, steps: Any) -> int:
    """Check that every backend can count the steps; rates of later ones would be wrong."""
    if steps > MOST_STEPS:
        checks.fail(
            f"Rates are computed for {MOST_STEPS:,} steps at most, which is what JAX counts to.",
            **{name: steps},
        )
    return int(steps)


def milestones_at(schedule: Any, events: Sequence[tuple[int, str]]) -> tuple[Milestone, ...]:
    """Return the rates at some steps; for a constant rate no framework is loaded.

    >>> milestones_at(0.5, [(0, "first"), (9, "last")])[1]
    Milestone(step=9, event='last', learning_rate=0.5)

    Args:
        schedule: A schedule, or a number for a constant rate.
        events: Steps, and what happens at each.
    """
    if isinstance(schedule, (int, float)):
        rates = [float(schedule)] * len(events)
    else:
        from kdpkit import schedules  # loads Keras

        found = schedules.preview(schedule, [step for step, _ in events])
        rates = [float(str(rate)) for rate in found]  # 0.001, not 0.00100000004
    pairs = zip(events, rates, strict=True)
    return tuple(Milestone(step, event, rate) for (step, event), rate in pairs)
