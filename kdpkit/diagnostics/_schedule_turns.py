"""The steps at which a schedule goes over from one kind of curve to another."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from keras.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    PiecewiseConstantDecay,
    PolynomialDecay,
)

from kdpkit import schedules

END = "end of decay"
_WARM = "end of warmup"
_NEXT = "next schedule"

Turn = tuple[int, str]


@functools.singledispatch
def turns(schedule: Any, steps: int) -> Iterator[Turn]:
    """Give the turns of a schedule in order, and what happens there; of an unknown one none.

    Those that come again and again are given up to `steps`, all others wherever they are.

    >>> [*turns(schedules.warmup_cosine(1.0, total_steps=90, warmup_steps=10), 0)]
    [(10, 'end of warmup'), (90, 'end of decay')]
    """
    del schedule, steps
    yield from ()


@turns.register
def _(schedule: schedules.LinearWarmup, steps: int) -> Iterator[Turn]:
    warmup = schedule.warmup_steps
    yield warmup, _WARM
    for step, event in turns(schedule.schedule, steps - warmup):
        yield warmup + step, event


@turns.register
def _(schedule: schedules.ScaledSchedule, steps: int) -> Iterator[Turn]:
    yield from turns(schedule.schedule, steps)


@turns.register
def _(schedule: schedules.JoinedSchedule, steps: int) -> Iterator[Turn]:
    starts = [0, *schedule.boundaries]
    for inner, start, end in itertools.zip_longest(schedule.schedules, starts, schedule.boundaries):
        if start:
            yield start, _NEXT
        for step, event in turns(inner, steps - start):
            if end is None or start + step < end:
                yield start + step, event


@turns.register
def _(schedule: schedules.WarmupStableDecay, steps: int) -> Iterator[Turn]:
    del steps
    if schedule.warmup_steps:
        yield schedule.warmup_steps, _WARM
    yield schedule.total_steps - schedule.decay_steps, "decay begins"
    yield schedule.total_steps, END


@turns.register
def _(schedule: schedules.NoamDecay, steps: int) -> Iterator[Turn]:
    del steps
    yield schedule.warmup_steps, _WARM


@turns.register
def _(schedule: CosineDecay, steps: int) -> Iterator[Turn]:
    del steps
    has_warmup = schedule.warmup_target is not None and schedule.warmup_steps > 0
    if has_warmup:
        yield schedule.warmup_steps, _WARM
    yield schedule.decay_steps + schedule.warmup_steps * has_warmup, END


@turns.register
def _(schedule: PolynomialDecay, steps: int) -> Iterator[Turn]:
    if not schedule.cycle:
        yield schedule.decay_steps, END
        return
    ends = itertools.count(schedule.decay_steps, schedule.decay_steps)
    for step in itertools.takewhile(lambda step: step < steps, ends):
        yield _after(step), "restart"


@turns.register
def _(schedule: CosineDecayRestarts, steps: int) -> Iterator[Turn]:
    settings = schedule.get_config()
    length = step = settings["first_decay_steps"]
    while step < steps and length >= 1:  # with `t_mul` below 1 they come ever faster
        yield math.ceil(step), "restart"
        length *= settings["t_mul"]
        step += length


@turns.register
def _(schedule: PiecewiseConstantDecay, steps: int) -> Iterator[Turn]:
    del steps
    for boundary in schedule.boundaries:
        yield _after(boundary), "next rate"


def _after(boundary: float) -> int:
    """Give the first step past a boundary at which the former curve still applies."""
    return math.floor(boundary) + 1
