"""Learning rates and their milestones as a figure."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit import schedules
from kdpkit._internal.pyplot import pyplot_for, saved
from kdpkit.diagnostics._rates.rate_milestones import Milestone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = tuple[
    LearningRateSchedule | float, int, Sequence[Milestone]
]  # a schedule, over so many steps
_MOST_POINTS = 2000  # of one line


def draw(
    curves: Mapping[str, Curve], path: str | os.PathLike[str] | None, *, epochs: int | None = None
) -> "Axes":
    """Draw schedules into one figure, with a dot at each milestone.

    Args:
        curves: For each label its schedule, number of steps, and milestones.
        path: Image file to write; None leaves the figure open in pyplot.
        epochs: The epochs of every curve, to draw them over epochs; None draws them over steps.
    """
    _, axes = pyplot_for(path).subplots(figsize=(8.0, 4.5), layout="constrained")
    for label, (schedule, steps, milestones) in curves.items():
        drawn = points(steps, milestones)
        schedules.plot(schedule, drawn, axes=axes)
        line = axes.lines[-1]
        dots = np.searchsorted(drawn, [milestone.step for milestone in milestones])
        line.set(label=label, marker="o", markersize=4, markevery=dots.tolist())
        if epochs:
            line.set_xdata(line.get_xdata() * epochs / steps)
    axes.relim()
    axes.autoscale()
    axes.set(ylim=(min(0.0, axes.get_ylim()[0]), None), xlabel="epoch" if epochs else "step")
    axes.legend() if len(curves) > 1 else axes.set_title(*curves)
    if path is not None:
        saved(axes.figure, path)
    return axes


def points(steps: int, milestones: Sequence[Milestone], most: int = _MOST_POINTS) -> list[int]:
    """Return steps that are spread evenly over a run, and those of its milestones."""
    spread = np.linspace(0, steps - 1, min(steps, most)).round().astype(int)
    return sorted({*spread.tolist(), *(milestone.step for milestone in milestones)})
