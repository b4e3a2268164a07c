"""Schedules side by side: their rates, milestones and curves."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit import _checks, schedules
from kdpkit.diagnostics import _chart, _milestones, _rate_picture, _script
from kdpkit.diagnostics._milestones import Milestone
from kdpkit.diagnostics._schedule_turns import END, turns

_MOST_COMPUTED = 100_000  # steps of one curve
_MOST_MILESTONES = 16
_SAMPLED = 101  # steps in `to_dict`
_WIDTH = 80
_HEIGHT, _HEIGHT_OF_SEVERAL = 13, 9


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """What `compare_schedules` gives.

    Attributes:
        schedules: Under their names; a number is a constant rate.
        steps: Steps that are looked at, from 0.
        milestones: Of each schedule: the first and the last step, the peak, and where it goes over
            from one kind of curve to another, such as the end of its warmup.
    """

    schedules: Mapping[str, LearningRateSchedule | float]
    steps: int
    milestones: Mapping[str, tuple[Milestone, ...]]

    def __str__(self) -> str:
        """Draw the curves, on the same axes, in lines of 80 columns, each over its milestones."""
        rates = {name: self._rates(name, _MOST_COMPUTED) for name in self.schedules}
        low = min(0.0, *(float(each.min()) for _, each in rates.values()))
        high = max(float(each.max()) for _, each in rates.values())
        high = high if high > low else low + 1
        height = _HEIGHT if len(rates) == 1 else _HEIGHT_OF_SEVERAL
        panels = [
            "\n".join(
                [name, *_chart.chart(*curve, low=low, high=high, width=_WIDTH, height=height)]
            )
            for name, curve in rates.items()
        ]
        tables = ["\n".join(_table(self.milestones[name])) for name in rates]
        return "\n\n".join(itertools.chain(*zip(panels, tables, strict=True)))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw all schedules into one picture.

        Args:
            path: Picture file to write, as for `kdpkit.schedules.plot`.

        Returns:
            The matplotlib `Axes`.

        Raises:
            ValueError: The picture cannot be written.
            ImportError: matplotlib is not installed.
        """
        return _rate_picture.draw(
            {
                name: (schedule, self.steps, self.milestones[name])
                for name, schedule in self.schedules.items()
            },
            path,
        )

    def to_dict(self) -> dict[str, Any]:
        """Give milestones, and the rates at about a hundred steps, as plain values, for JSON."""
        return {
            "steps": self.steps,
            "schedules": [self._as_dict(name) for name in self.schedules],
        }

    def _as_dict(self, name: str) -> dict[str, Any]:
        steps, rates = self._rates(name, _SAMPLED)
        return {
            "name": name,
            "milestones": _milestones.as_dicts(self.milestones[name]),
            "steps": steps.tolist(),
            "learning_rates": _milestones.shortest(rates),
        }

    def _rates(self, name: str, most: int) -> tuple[np.ndarray, np.ndarray]:
        steps = _rate_picture.points(self.steps, self.milestones[name], most)
        return np.asarray(steps), schedules.preview(self.schedules[name], steps)


def compare_schedules(
    given: Mapping[str, LearningRateSchedule | float], *, steps: int | None = None
) -> ScheduleComparison:
    """Compute the rates of schedules over the same steps, and the steps that matter.

    Of a run longer than 100,000 steps that many are computed, spread evenly. The rates are those
    of all replicas, which share the count of steps.

    >>> decay = schedules.warmup_cosine(1e-3, total_steps=1000, warmup_steps=100)
    >>> for milestone in compare_schedules({"cosine": decay}).milestones["cosine"]:
    ...     print(milestone.step, milestone.event)
    0 first
    100 end of warmup, peak
    999 last

    Args:
        given: Schedules, or numbers for constant rates, each under a name.
        steps: Number of steps to look at, from step 0; None goes to the end of the longest decay.

    Raises:
        ValueError: No schedule, one that fails or gives a rate that is not finite, or no `steps`
            where no schedule has an end.
    """
    if not given:
        _checks.refuse("There is no schedule to compare.", given=given)
    length = _longest(given) if steps is None else _checks.integer("steps", steps)
    _milestones.countable("steps", length)
    milestones = {name: _milestones_of(name, given[name], length) for name in given}
    return ScheduleComparison(dict(given), length, milestones)


def _longest(given: Mapping[str, Any]) -> int:
    last = [[*turns(schedule, 0)][-1:] for schedule in given.values()]
    ends = [step for turn in last for step, event in turn if event == END]
    if not ends:
        _checks.refuse(
            "None of the schedules has an end.", remedy="Say how many steps to look at: `steps`."
        )
    return max(ends)


def _milestones_of(name: str, schedule: Any, length: int) -> tuple[Milestone, ...]:
    steps = np.linspace(0, length - 1, min(length, _MOST_COMPUTED)).round().astype(int)
    inside = [*_within(schedule, length)]
    looked_at = np.union1d(steps, [step for step, _ in inside]).astype(int)
    rates = _finite_rates(name, schedule, looked_at)
    events: dict[int, list[str]] = {0: ["first"]}
    for step, event in inside:
        events.setdefault(step, []).append(event)
    if rates.min() < rates.max():
        events.setdefault(int(looked_at[rates.argmax()]), []).append("peak")
    events.setdefault(length - 1, []).append("last")
    return _milestones.at(
        schedule, [(step, ", ".join(what)) for step, what in sorted(events.items())]
    )


def _within(schedule: Any, length: int) -> Iterator[tuple[int, str]]:
    """Give the turns inside of a run, the first few of many, at whole steps."""
    whole = ((math.ceil(step), event) for step, event in turns(schedule, length))
    inside = ((step, event) for step, event in whole if 0 < step < length)
    yield from itertools.islice(inside, _MOST_MILESTONES)


def _finite_rates(name: str, schedule: Any, steps: np.ndarray) -> np.ndarray:
    try:
        rates = schedules.preview(schedule, steps.tolist())
    except _checks.InputError:
        raise
    except Exception as error:  # a schedule of anyone's may raise anything
        raise _checks.InputError(f"`{name}` fails when it is called: {_said(error)}") from error
    finite = np.isfinite(rates)
    if not finite.all():
        place = int(finite.argmin())
        _checks.refuse(
            f"`{name}` gives a rate that is not finite.",
            step=int(steps[place]),
            rate=float(rates[place]),
        )
    return rates


def _said(error: Exception) -> str:
    """Give an error in one line; TensorFlow puts where it was called before it."""
    *_, last = str(error).strip().splitlines() or [""]
    return last.strip() if str(error).startswith("in user code:") else _script.said(error)


def _table(milestones: tuple[Milestone, ...]) -> Iterator[str]:
    yield f"{'step':>12}  {'rate':>11}"
    for milestone in milestones:
        yield f"{milestone.step:>12,}  {milestone.learning_rate:>11.4g}  {milestone.event}"
