"""`kdpkit doctor`: mistakes in a training's input, slow steps, TPU obstacles."""

import argparse

from kdpkit._internal import checks

TAKES_REST = True
HELP = "find mistakes in a training's input, what slows it, or what would stop it on a TPU"
_SECONDS = 20.0
# Arguments of the program's `fit`, besides its dataset, that each check takes.
_ARGUMENTS = {
    "check_input": (
        *("model", "validation_data", "validation_split"),
        *("batch_size", "epochs", "steps_per_epoch", "shuffle"),
    ),
    "check_speed": ("model", "batch_size"),
    "check_tpu": ("model", "validation_data", "batch_size"),
}

EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or
`module:name` or `file.py:name` of a function that returns a dataset or
(dataset, model). Its backend is the one of KERAS_BACKEND, or of such a line in
the file itself:

    kdpkit doctor train.py -- --epochs 3
    kdpkit doctor --measure train.py -- --epochs 3
    KERAS_BACKEND=jax kdpkit doctor --tpu recipes/cnn_fit.py -- --smoke
    KERAS_BACKEND=jax kdpkit doctor --tpu train.py:make

Where its data are as they should be, its step is traced, to find what makes it
slow. With --measure it trains for a moment, undoes that, and reports how long a
step takes, how much of it waits for input, and the slowest stage of the
pipeline.

Exit code 0: nothing found, or only notes. 1: findings; with --measure also that
a fifth of a step or more waits for input. 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kdpkit doctor [--tpu | --measure] TARGET [flags] [-- script's arguments]"
    parser.add_argument("target", metavar="TARGET", help="the training to check")
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--tpu", action="store_true", help="check it for a TPU instead")
    time = "train it for a moment, and report how long a step takes and waits for input"
    check.add_argument("--measure", action="store_true", help=time)
    seconds = "about how long to measure, without compiling (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=_SECONDS, metavar="S", help=seconds)
    replicas = "cores of the TPU that share a global batch (default: %(default)s)"
    parser.add_argument("--replicas", type=int, default=8, metavar="N", help=replicas)


def run(args: argparse.Namespace) -> int:
    settings: dict[str, float]
    if args.tpu:
        name, settings = "check_tpu", {"replicas": checks.integer("replicas", args.replicas)}
    elif args.measure:
        name, settings = "check_speed", {"seconds": checks.number("seconds", args.seconds, above=0)}
    else:
        name, settings = "check_input", {}
    from kdpkit.diagnostics._doctor import target

    with target.program_of(args.target, args.rest) as program:
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        arguments = {field: getattr(program, field) for field in _ARGUMENTS[name]}
        report = getattr(diagnostics, name)(program.dataset, **arguments, **settings)
    print(report)
    return 0 if report.clean else 1
