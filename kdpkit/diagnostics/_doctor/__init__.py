"""`kdpkit doctor`: mistakes in a training's input, and slow steps."""

import argparse

from kdpkit._internal import checks

TAKES_REST = True
HELP = "find mistakes in a training's input, or what slows it"
_SECONDS = 20.0

EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or
`module:name` or `file.py:name` of a function that returns a dataset or
(dataset, model):

    kdpkit doctor train.py -- --epochs 3
    kdpkit doctor --measure train.py -- --epochs 3
    KERAS_BACKEND=jax kdpkit doctor --measure train.py:make

With --measure it trains for a moment, undoes that, and reports how long a step
takes, how much of it waits for input, and the slowest stage of the pipeline.

Exit code 0: nothing found, or only notes; with --measure: less than a fifth of
a step waits for input. 1: findings, or more. 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kdpkit doctor [--measure] TARGET [flags] [-- script's arguments]"
    parser.add_argument("target", metavar="TARGET", help="check the tf.data pipelines of this")
    time = "train it for a moment, and report how long a step takes and waits for input"
    parser.add_argument("--measure", action="store_true", help=time)
    seconds = "about how long to measure, without compiling (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=_SECONDS, metavar="S", help=seconds)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if it is clean, else 1."""
    seconds = checks.number("seconds", args.seconds, above=0)
    from kdpkit.diagnostics._doctor import target

    with target.program_of(args.target, args.rest) as program:
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        report: diagnostics.SpeedReport | diagnostics.Report
        if args.measure:
            report = diagnostics.check_speed(
                program.dataset,
                model=program.model,
                batch_size=program.batch_size,
                seconds=seconds,
            )
        else:
            report = diagnostics.check_input(
                program.dataset,
                model=program.model,
                validation_data=program.validation_data,
                epochs=program.epochs,
                steps_per_epoch=program.steps_per_epoch,
            )
    print(report)
    return 0 if report.clean else 1
