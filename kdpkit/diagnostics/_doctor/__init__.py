"""`kdpkit doctor`: mistakes in a training's input, slow steps, TPU obstacles."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kdpkit._internal import checks
from kdpkit.diagnostics import _require_keras

if TYPE_CHECKING:
    from kdpkit.diagnostics._doctor.target import Program

TAKES_REST = True
HELP = "find mistakes in a training's input, what slows it, or what would stop it on a TPU"
_SECONDS = 20.0
_STDOUT, _STDERR = 1, 2  # file descriptors
# What each check is passed of the program, besides its dataset.
_OF_PROGRAM = {
    "check_input": ("model", "validation_data", "epochs", "steps_per_epoch"),
    "check_speed": ("model", "batch_size"),
    "check_tpu": ("model", "callbacks", "validation_data", "batch_size", "validation_batch_size"),
}

EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or
`module:name` or `file.py:name` of a dataset, or of a function that returns a
dataset or (dataset, model):

    kdpkit doctor train.py -- --epochs 3
    kdpkit doctor --measure train.py -- --epochs 3
    kdpkit doctor --tpu recipes/cnn_jax.py -- --per-replica-batch-size 256
    KERAS_BACKEND=jax kdpkit doctor --tpu train.py:make_dataset --json

With --measure it trains for a moment, undoes that, and reports how long a step
takes, how much of it waits for input, and the slowest stage of the pipeline.

Exit code 0: nothing found, or only notes; with --measure: less than a fifth of
a step waits for input. 1: findings, or more. 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to check, and for what."""
    parser.usage = "kdpkit doctor [--tpu | --measure] TARGET [flags] [-- script's arguments]"
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="check the tf.data pipelines of this")
    add("--tpu", metavar="TARGET", help="check this for a TPU")
    add(
        "--measure",
        action="store_true",
        help="train TARGET for a moment, and report how long a step takes and waits for input",
    )
    seconds = f"about how long to measure, without compiling (default: {_SECONDS:g})"
    add("--seconds", type=float, metavar="S", help=seconds)
    workers = "processes that divide the data between them (default: %(default)s)"
    add("--workers", type=int, default=1, metavar="N", help=workers)
    replicas = "cores of the TPU that share a global batch (default: %(default)s)"
    add("--replicas", type=int, default=8, metavar="N", help=replicas)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if it is clean, else 1."""
    name, settings = _check_of(args)
    from kdpkit.diagnostics import _text
    from kdpkit.diagnostics._doctor import target

    def check(program: "Program") -> Any:
        _require_keras.require()
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        given = {field: getattr(program, field) for field in _OF_PROGRAM[name]}
        return getattr(diagnostics, name)(program.dataset, **given, **settings)

    with _stdout_to_stderr():
        report = target.checked(args.tpu or args.target, args.rest, check)
    _text.show(report, as_json=args.json)
    return 0 if report.clean else 1


def _check_of(args: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Return the name of the check that the flags ask for, and its settings."""
    if (args.tpu is None) == (args.target is None):
        checks.fail(
            "`kdpkit doctor` checks one target, on this machine or for a TPU.",
            target=args.target,
            tpu=args.tpu,
            remedy="Write `kdpkit doctor train.py`, or `kdpkit doctor --tpu train.py`.",
        )
    if args.measure and args.tpu is not None:
        checks.fail(
            "Speed is measured on this machine, not on a TPU.",
            tpu=args.tpu,
            remedy="Write `kdpkit doctor --measure train.py`.",
        )
    if args.seconds is not None and not args.measure:
        checks.fail("`--seconds` is about `--measure`.", seconds=args.seconds)
    seconds = checks.number("seconds", _SECONDS if args.seconds is None else args.seconds, above=0)
    if args.tpu is not None:
        return "check_tpu", {"replicas": checks.integer("replicas", args.replicas)}
    if args.measure:
        return "check_speed", {"seconds": seconds}
    return "check_input", {"workers": checks.integer("workers", args.workers)}


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for the report: what is printed meanwhile, by child processes too, is stderr."""
    sys.stdout.flush()
    saved = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        (sys.__stdout__ or sys.stdout).flush()  # what is left in it goes to stderr too
        os.dup2(saved, _STDOUT)
        os.close(saved)
