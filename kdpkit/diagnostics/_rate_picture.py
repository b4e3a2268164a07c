"""Learning rates and their milestones as a picture."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kdpkit import schedules
from kdpkit._pyplot import pyplot_for, saved
from kdpkit.diagnostics._milestones import Milestone

_INCHES = (8.0, 4.5)
_ROOM = 0.12  # above the highest rate, for words, as a share of the picture
_MOST_POINTS = 2000  # of one line


def draw(
    curves: Mapping[str, tuple[Any, int, Sequence[Milestone]]],
    path: str | os.PathLike[str] | None,
    *,
    epochs: int | None = None,
) -> Any:
    """Draw schedules into one picture, with a dot and a word at each milestone.

    Args:
        curves: For each label its schedule, number of steps, and milestones.
        path: Picture file to write; None leaves the figure open in pyplot.
        epochs: What the steps of every curve amount to, to draw them over epochs; None draws them
            over steps.

    Returns:
        The matplotlib `Axes`.
    """
    pyplot = pyplot_for(path)
    figure, axes = pyplot.subplots(figsize=_INCHES, layout="constrained")
    for label, (schedule, steps, milestones) in curves.items():
        schedules.plot(schedule, points(steps, milestones), axes=axes)
        line = axes.lines[-1]
        line.set_label(label)
        _mark(axes, milestones, color=line.get_color(), with_words=len(curves) == 1)
        for drawn in axes.lines[-2:] if epochs else ():
            drawn.set_xdata(drawn.get_xdata() * epochs / steps)
    axes.relim()
    axes.margins(y=_ROOM)
    axes.autoscale()
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    if epochs:
        axes.set_xlabel("epoch")
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend() if len(curves) > 1 else axes.set_title(*curves)
    if path is not None:
        saved(figure, path)
    return axes


def points(steps: int, milestones: Sequence[Milestone], most: int = _MOST_POINTS) -> list[int]:
    """Give steps that are spread evenly over a run, and those of its milestones."""
    spread = np.linspace(0, steps - 1, min(steps, most)).round().astype(int)
    return sorted({*spread.tolist(), *(milestone.step for milestone in milestones)})


def _mark(axes: Any, milestones: Sequence[Milestone], *, color: Any, with_words: bool) -> None:
    rates = [milestone.learning_rate for milestone in milestones]
    steps = [milestone.step for milestone in milestones]
    axes.plot(np.array(steps), rates, "o", color=color, markersize=4)
    for milestone in milestones if with_words else ():
        is_left = milestone.step <= steps[-1] / 2
        axes.annotate(
            f"{milestone.event}: {milestone.learning_rate:.3g}",
            (milestone.step, milestone.learning_rate),
            textcoords="offset points",
            xytext=(6 if is_left else -6, 6),
            ha="left" if is_left else "right",
            fontsize="small",
        )
