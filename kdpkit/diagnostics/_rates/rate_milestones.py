"""The steps of a run at which its learning rate changes its course."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdpkit._internal import checks

MOST_STEPS = 2**31 - 1  # JAX counts an optimizer's steps in int32
END = "end of decay"
_WARM = "end of warmup"


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


def at(schedule: Any, events: Sequence[tuple[int, str]]) -> tuple[Milestone, ...]:
    """Return the rates at some steps; for a constant rate no framework is loaded.

    >>> at(0.5, [(0, "first"), (9, "last")])[1]
    Milestone(step=9, event='last', learning_rate=0.5)

    Args:
        schedule: A schedule, or a number for a constant rate.
        events: Steps, and what happens at each.
    """
    rates = _rates(schedule, [step for step, _ in events])
    pairs = zip(events, rates, strict=True)
    return tuple(Milestone(step, event, rate) for (step, event), rate in pairs)


def changes(schedule: Any) -> list[tuple[int, str]]:
    """Return the steps where the warmup of a schedule or its decay ends; of an unknown one none.

    >>> from kdpkit import schedules
    >>> changes(schedules.warmup_cosine(1.0, total_steps=90, warmup_steps=10))
    [(10, 'end of warmup'), (90, 'end of decay')]
    """
    from keras.optimizers import schedules as of_keras

    from kdpkit import schedules

    match schedule:
        case schedules.LinearWarmup():
            inner = changes(schedule.schedule)
            warmup = schedule.warmup_steps
            return [(warmup, _WARM), *((warmup + step, event) for step, event in inner)]
        case schedules.ScaledSchedule():
            return changes(schedule.schedule)
        case schedules.JoinedSchedule():
            starts = [0, *schedule.boundaries]
            ends = [*schedule.boundaries, MOST_STEPS]
            found = [(start, "next schedule") for start in schedule.boundaries]
            for each, start, end in zip(schedule.schedules, starts, ends, strict=True):
                inner = [(start + step, event) for step, event in changes(each)]
                found += [(step, event) for step, event in inner if step < end]
            return sorted(found)
        case schedules.WarmupStableDecay():
            total = schedule.total_steps
            warm = [(schedule.warmup_steps, _WARM)] if schedule.warmup_steps else []
            return [*warm, (total - schedule.decay_steps, "decay begins"), (total, END)]
        case schedules.NoamDecay():
            return [(schedule.warmup_steps, _WARM)]
        case of_keras.CosineDecay() if schedule.warmup_target is not None:
            warmup = schedule.warmup_steps
            return [(warmup, _WARM), (warmup + schedule.decay_steps, END)]
        case of_keras.CosineDecay() | of_keras.PolynomialDecay(cycle=False):
            return [(schedule.decay_steps, END)]
    return []


def as_dicts(milestones: Sequence[Milestone]) -> list[dict[str, Any]]:
    """Return the milestones as plain values, for JSON."""
    return [dataclasses.asdict(milestone) for milestone in milestones]


def _rates(schedule: Any, steps: list[int]) -> list[float]:
    if isinstance(schedule, (int, float)):
        return [float(schedule)] * len(steps)
    from kdpkit import schedules  # loads Keras

    return shortest(schedules.preview(schedule, steps))


def shortest(rates: Any) -> list[float]:
    """Return float32 rates as Python's floats of the fewest digits: 0.001, not 0.00100000004."""
    return [float(str(rate)) for rate in rates]
