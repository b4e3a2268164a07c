"""`kdpkit lr`: learning-rate schedules, drawn and compared without training."""

import argparse
import json
import sys
from typing import Any

from kdpkit import _checks
from kdpkit._commands import _keras

HELP = "draw and compare learning-rate schedules"

_CURVES = r"[\u2801-\u28ff]+"
_EXAMPLE = """\
SCHEDULE is a call of a name of `kdpkit.schedules` or
`keras.optimizers.schedules`, which is read and not run as code; a rate; or
`module:name` or `file.py:name` of a schedule, or of a function without
arguments that gives one:

    kdpkit lr "warmup_cosine(1e-3, total_steps=1000, warmup_steps=100)" \\
        "NoamDecay(512, 4000)" --steps 1000 --plot rates.png
    kdpkit lr train.py:schedule --steps 5000 --json

Exit code 0: drawn; 2: one of them is no schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name the schedules, and how far to look."""
    parser.usage = "kdpkit lr SCHEDULE [SCHEDULE ...] [--steps N] [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("schedules", nargs="+", metavar="SCHEDULE", help="a call, a rate, or file.py:name")
    add("--steps", type=int, metavar="N", help="steps to look at (default: the longest decay)")
    add("--plot", metavar="FILE", help="draw them into this picture too")


def run(args: argparse.Namespace) -> int:
    """Print the curves and milestones; give 0."""
    if args.steps is not None:
        _checks.integer("steps", args.steps)
    made = {name: _from_target(name) for name in args.schedules if _is_target(name)}
    _keras.require()
    from kdpkit import diagnostics  # loads Keras, whose backend a target may have chosen

    given = {
        name: made[name] if name in made else diagnostics.read_schedule(name)
        for name in args.schedules
    }
    comparison = diagnostics.compare_schedules(given, steps=args.steps)
    if args.plot is not None:
        comparison.plot(args.plot)
    if args.json:
        sys.stdout.write(json.dumps(comparison.to_dict(), indent=2) + "\n")
    else:
        _print(str(comparison))
    return 0


def _is_target(text: str) -> bool:
    """Say whether it is `module:name`; in calls a colon stands only inside of strings."""
    return ":" in text and "(" not in text


def _from_target(target: str) -> Any:
    from kdpkit.diagnostics import _target

    with _target.named(target, makes=_makes_schedule) as given:
        return given


def _makes_schedule(value: Any) -> bool:
    from keras.optimizers.schedules import LearningRateSchedule

    return callable(value) and not isinstance(value, LearningRateSchedule)


def _print(text: str) -> None:
    """Print with the curves in colour on a terminal, and in ASCII where it has nothing else."""
    from rich.console import Console
    from rich.text import Text

    from kdpkit.diagnostics import _chart

    drawn = Text(_chart.printable(text, sys.stdout))
    drawn.highlight_regex(_CURVES, "cyan")
    Console(highlight=False, soft_wrap=True).print(drawn)
