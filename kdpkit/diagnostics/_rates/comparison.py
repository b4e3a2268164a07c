"""Schedules side by side: their rates, milestones and curves."""

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit import errors, schedules
from kdpkit._internal import checks
from kdpkit.diagnostics import _text
from kdpkit.diagnostics._rates import rate_milestones, rate_plot, terminal_chart
from kdpkit.diagnostics._rates.rate_milestones import Milestone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Schedule: TypeAlias = LearningRateSchedule | float
_MOST_COMPUTED = 100_000  # steps of one curve
_SAMPLED = 101  # steps in `to_dict`


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """Schedules over the same steps, as `compare_schedules` returns them.

    Attributes:
        schedules: Under their names; a number is a constant rate.
        steps: Steps that are looked at, from 0.
        milestones: Of each schedule: the first and the last step, the peak, and where its warmup
            and its decay end.
    """

    schedules: Mapping[str, Schedule]
    steps: int
    milestones: Mapping[str, tuple[Milestone, ...]]

    def __str__(self) -> str:
        """Draw the curves, on the same axes, in lines of 80 columns, each over its milestones."""
        rates = {name: self._rates(name, _MOST_COMPUTED) for name in self.schedules}
        high = max(float(each.max()) for _, each in rates.values())
        high, height = high if high > 0 else 1.0, 13 if len(rates) == 1 else 9
        return "\n\n".join(
            f"{name}\n{terminal_chart.chart(*curve, high=high, height=height)}\n\n"
            + _table(self.milestones[name])
            for name, curve in rates.items()
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Axes":
        """Draw all schedules into one figure, and return its axes.

        Args:
            path: Image file to write, as for `kdpkit.schedules.plot`, which has the errors too.
        """
        curves = {
            name: (schedule, self.steps, self.milestones[name])
            for name, schedule in self.schedules.items()
        }
        return rate_plot.draw(curves, path)

    def to_dict(self) -> dict[str, Any]:
        """Return milestones, and the rates at about a hundred steps, as plain values, for JSON."""
        return {"steps": self.steps, "schedules": [*map(self._as_dict, self.schedules)]}

    def _as_dict(self, name: str) -> dict[str, Any]:
        steps, rates = self._rates(name, _SAMPLED)
        return {
            "name": name,
            "milestones": [*map(dataclasses.asdict, self.milestones[name])],
            "steps": steps.tolist(),
            "learning_rates": rate_milestones.shortest(rates),
        }

    def _rates(self, name: str, most: int) -> tuple[np.ndarray, np.ndarray]:
        steps = rate_plot.points(self.steps, self.milestones[name], most)
        return np.asarray(steps), schedules.preview(self.schedules[name], steps)


def compare_schedules(
    given: Mapping[str, Schedule], *, steps: int | None = None
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
        ValueError: No schedule, one that raises or has a rate that is not finite, or no `steps`
            where no schedule has a known end.
    """
    if not given:
        checks.fail("There is no schedule to compare.", given=given)
    length = _longest(given) if steps is None else checks.integer("steps", steps)
    rate_milestones.countable("steps", length)
    milestones = {name: _milestones_of(name, given[name], length) for name in given}
    return ScheduleComparison(dict(given), length, milestones)


def _longest(given: Mapping[str, Schedule]) -> int:
    found = itertools.chain.from_iterable(map(rate_milestones.changes_of, given.values()))
    ends = [step for step, event in found if event == schedules.END_OF_DECAY]
    if not ends:
        checks.fail(
            "None of the schedules has a known end.",
            remedy="Set how many steps to look at: `steps`.",
        )
    return math.ceil(max(ends))  # Keras takes parts of a step


def _milestones_of(name: str, schedule: Schedule, length: int) -> tuple[Milestone, ...]:
    found = [(math.ceil(step), event) for step, event in rate_milestones.changes_of(schedule)]
    changes = [(step, event) for step, event in found if 0 < step < length]
    spread = np.linspace(0, length - 1, min(length, _MOST_COMPUTED)).round()
    steps = np.union1d(spread, [step for step, _ in changes]).astype(int)
    rates = _finite_rates(name, schedule, steps)
    if rates.min() < rates.max():
        changes.append((int(steps[rates.argmax()]), "peak"))
    events: dict[int, list[str]] = {0: ["first"]}
    for step, event in [*changes, (length - 1, "last")]:
        events.setdefault(step, []).append(event)
    return rate_milestones.milestones_at(
        schedule, [(step, ", ".join(what)) for step, what in sorted(events.items())]
    )


def _finite_rates(name: str, schedule: Schedule, steps: np.ndarray) -> np.ndarray:
    try:
        rates = schedules.preview(schedule, steps.tolist())
    except errors.InputError:
        raise
    except Exception as error:  # a schedule of anyone's may raise anything
        raise errors.InputError(
            f"`{name}` fails when it is called: {_text.reason_of(error)}"
        ) from error
    first = int(np.isfinite(rates).argmin())
    if not np.isfinite(rates[first]):
        step, rate = int(steps[first]), float(rates[first])
        checks.fail(f"`{name}` has a rate that is not finite.", step=step, rate=rate)
    return rates


def _table(milestones: tuple[Milestone, ...]) -> str:
    rows = [(f"{each.step:,}", f"{each.learning_rate:.4g}", each.event) for each in milestones]
    return _text.table([("step", "rate", ""), *rows], left=(2,))
