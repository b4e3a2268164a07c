"""The steps of a run at which its learning rate changes its course."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdpkit._internal import checks

if TYPE_CHECKING:
    from kdpkit.schedules import Changes

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

        rates = shortest(schedules.preview(schedule, [step for step, _ in events]))
    pairs = zip(events, rates, strict=True)
    return tuple(Milestone(step, event, rate) for (step, event), rate in pairs)


def changes_of(schedule: Any) -> list[tuple[int, str]]:
    """Return the steps where the warmup of a schedule or its decay ends; of an unknown one none.

    >>> from kdpkit import schedules
    >>> changes_of(schedules.warmup_cosine(1.0, total_steps=90, warmup_steps=10))
    [(10, 'end of warmup'), (90, 'end of decay')]
    """
    if isinstance(schedule, (int, float)):
        return []
    from kdpkit import schedules  # loads Keras

    is_own = isinstance(schedule, schedules._Schedule)
    changes = schedule._changes() if is_own else _changes_of_keras(schedule)
    found = []
    for (begin, event, followed), (end, *_) in itertools.pairwise([*changes, (MOST_STEPS, "", 0)]):
        within = [(begin + step, name) for step, name in changes_of(followed or 0)]
        found += [(step, name) for step, name in [(begin, event), *within] if name and step < end]
    return found


def _changes_of_keras(schedule: Any) -> "Changes":
    """Return what `_changes` of kdpkit's schedules returns, for those of Keras that end."""
    from keras.optimizers.schedules import CosineDecay, PolynomialDecay

    from kdpkit.schedules import END_OF_DECAY, END_OF_WARMUP

    match schedule:
        case CosineDecay() if schedule.warmup_target is not None:
            warmup = schedule.warmup_steps
            end = warmup + schedule.decay_steps
            return [(warmup, END_OF_WARMUP, None), (end, END_OF_DECAY, None)]
        case CosineDecay() | PolynomialDecay(cycle=False):
            return [(schedule.decay_steps, END_OF_DECAY, None)]
    return []


def shortest(rates: Any) -> list[float]:
    """Return float32 rates as Python's floats of the fewest digits: 0.001, not 0.00100000004."""
    return [float(str(rate)) for rate in rates]
