"""`kdpkit lr`: learning-rate schedules, drawn and compared without training."""

import argparse
import os
from typing import Any

from kdpkit._internal import checks, require_keras

HELP = "draw and compare learning-rate schedules"

EXAMPLE = """\
SCHEDULE is a call of a name of `kdpkit.schedules` or
`keras.optimizers.schedules`, which is read and not run as code; a rate; or
`module:name` or `file.py:name` of a schedule, or of a function without
arguments that returns one:

    kdpkit lr "warmup_cosine(1e-3, total_steps=1000, warmup_steps=100)" \\
        "NoamDecay(512, 4000)" --steps 1000 --plot rates.png
    kdpkit lr train.py:schedule --steps 5000 --json

Exit code 0: drawn; 2: one of them is not a schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules, and how far to look."""
    parser.usage = "kdpkit lr SCHEDULE [SCHEDULE ...] [--steps N] [flags]"
    add = parser.add_argument
    add("schedules", nargs="+", metavar="SCHEDULE", help="a call, a rate, or file.py:name")
    add("--steps", type=int, metavar="N", help="steps to look at (default: the longest decay)")
    add("--plot", metavar="FILE", help="draw them into this image too")


def run(args: argparse.Namespace) -> int:
    """Print the curves and milestones; return 0."""
    if args.steps is not None:
        checks.integer("steps", args.steps)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before a target imports TensorFlow
    made = {name: _from_target(name) for name in args.schedules if _is_target(name)}
    require_keras.require()
    from kdpkit import diagnostics  # loads Keras, whose backend a target may have chosen
    from kdpkit.diagnostics import _text

    given = {
        name: made[name] if name in made else diagnostics.read_schedule(name)
        for name in args.schedules
    }
    comparison = diagnostics.compare_schedules(given, steps=args.steps)
    if args.plot is not None:
        comparison.plot(args.plot)
    _text.show(comparison, as_json=args.json)
    return 0


def _is_target(text: str) -> bool:
    """Return whether it is `module:name`; in calls a colon is only inside of strings."""
    return ":" in text and "(" not in text


def _from_target(target: str) -> Any:
    from kdpkit.diagnostics import _target

    with _target.named(target, makes=_makes_schedule) as given:
        return given


def _makes_schedule(value: Any) -> bool:
    from keras.optimizers.schedules import LearningRateSchedule

    return callable(value) and not isinstance(value, LearningRateSchedule)
