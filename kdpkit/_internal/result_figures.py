"""Figures of a run that is over, drawn from what a recipe returned."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kdpkit._internal import checks
from kdpkit._internal.pyplot import pyplot_for, saved

if TYPE_CHECKING:
    import keras
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = (3.6, 2.8)


def plot_results(
    results: Mapping[str, Any], path: str | os.PathLike[str] | None = None
) -> "Figure":
    """Draw what a recipe returned: its loss, its speed, and its learning rate.

    The rates that were applied at the epochs' last steps lie on the line of the schedule, if there
    is one: when they do not, something else has set the rate. A schedule of your own is drawn if
    its class is registered with Keras and imported.

    Args:
        results: What a recipe's `main` returned, or `json.load` read of its `--results`.
        path: Image file to write, of a kind that its suffix names (.png, .svg, .pdf). None leaves
            the figure open in pyplot, as notebooks show it.

    Returns:
        The matplotlib `Figure`.

    Raises:
        ValueError: There is no history in `results`, or no such directory for `path`.
        ImportError: matplotlib is not installed.
    """
    history = results.get("history") if isinstance(results, Mapping) else None
    if not isinstance(history, Mapping) or not len(history.get("loss", ())):
        checks.fail(
            "`results` must be what a recipe returned, with the history of an epoch at least.",
            results=[*results] if isinstance(results, Mapping) else results,
        )
    pyplot = pyplot_for(path)
    width, height = _PANEL_INCHES
    figure, panels = pyplot.subplots(1, 3, figsize=(3 * width, height), layout="constrained")
    _draw_loss(panels[0], history)
    _draw_speed(panels[1], history)
    _draw_rate(panels[2], results)
    if path is not None:
        saved(figure, path)
    return figure


def _draw_loss(axes: "Axes", history: Mapping[str, Any]) -> None:
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        if name in history:
            _draw_epochs(axes, history[name], label=label)
    axes.set(title="loss")
    axes.legend()


def _draw_speed(axes: "Axes", history: Mapping[str, Any]) -> None:
    for name, of in (("tokens_per_second", "real tokens"), ("examples_per_second", "examples")):
        if name in history:
            _draw_epochs(axes, history[name])
            axes.set(title=f"{of} per second", ylim=(0, 1.1 * max(history[name])))
            return
    axes.set(xlabel="epoch", title="speed")
    axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def _draw_epochs(axes: "Axes", values: list[float], label: str | None = None) -> None:
    axes.plot(np.arange(1, len(values) + 1), values, marker="o", label=label)
    axes.set(xlabel="epoch")
    axes.locator_params(axis="x", integer=True)


def _draw_rate(axes: "Axes", results: Mapping[str, Any]) -> None:
    applied = results.get("learning_rates") or []
    steps = results.get("steps") or len(applied)
    schedule = _schedule_of(results)
    if schedule is not None and steps:
        from kdpkit import schedules

        schedules.plot(schedule, steps, axes=axes)
    last_steps = np.arange(1, len(applied) + 1) * steps / max(1, len(applied)) - 1
    axes.plot(last_steps, applied, "o", label="applied, at epochs' ends")
    axes.set(xlabel="step", ylabel="", title="learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.legend()


def _schedule_of(
    results: Mapping[str, Any],
) -> "keras.optimizers.schedules.LearningRateSchedule | None":
    """Return the run's schedule; None if there is none, or its class is not imported here."""
    if results.get("schedule") is None:
        return None
    import keras

    try:
        return keras.saving.deserialize_keras_object(results["schedule"])
    except (TypeError, ValueError):
        return None
