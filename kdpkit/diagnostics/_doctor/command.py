"""`kdpkit doctor`: mistakes in a training's input, slow steps, TPU obstacles."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from kdpkit import _checks
from kdpkit._commands import _keras

TAKES_REST = True
HELP = "find mistakes in a training's input, what slows it, or what would stop it on a TPU"
_SECONDS = 20.0
_STDOUT, _STDERR = 1, 2  # file descriptors

_EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or
`module:name` or `file.py:name` of a dataset, or of a function that gives a
dataset or (dataset, model):

    kdpkit doctor train.py -- --epochs 3
    kdpkit doctor --measure train.py -- --epochs 3
    kdpkit doctor --tpu recipes/cnn_jax.py -- --per-replica-batch-size 256
    KERAS_BACKEND=jax kdpkit doctor --tpu train.py:make_dataset --json

With --measure it trains for a moment, takes that back, and says whether a step
waits for input, computes, or waits for Python, and which edit to try first.

Exit code 0: nothing found, or notes alone; with --measure: the time goes into
computing, and no edit that was tried saves much of it. 1: findings, or time
that goes elsewhere. 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what to check, and for what."""
    parser.usage = "kdpkit doctor [--tpu | --measure] TARGET [flags] [-- script's arguments]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="check the tf.data pipelines of this")
    add("--tpu", metavar="TARGET", help="check this for a TPU")
    add(
        "--measure",
        action="store_true",
        help="train TARGET for a moment, and tell where a step's time goes",
    )
    add(
        "--seconds",
        type=float,
        metavar="S",
        help=f"about how long to measure, without compiling (default: {_SECONDS:g})",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that divide the data between them (default: %(default)s)",
    )
    add(
        "--replicas",
        type=int,
        default=8,
        metavar="N",
        help="cores of the TPU that share a global batch (default: %(default)s)",
    )
    add(
        "--remote",
        action="store_true",
        help="the TPU is reached over the network, and reads no disk of this machine (TensorFlow)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; give 0 if it is clean, else 1."""
    if (args.tpu is None) == (args.target is None):
        _checks.refuse(
            "`kdpkit doctor` checks one target.",
            target=args.target,
            tpu=args.tpu,
            remedy="Write `kdpkit doctor train.py`, or `kdpkit doctor --tpu train.py`.",
        )
    _refuse_other_flags(args)
    seconds = _checks.number("seconds", _SECONDS if args.seconds is None else args.seconds, above=0)
    replicas = _checks.integer("replicas", args.replicas)
    workers = _checks.integer("workers", args.workers)
    from kdpkit.diagnostics import _target

    def check(training: Any) -> Any:
        _keras.require()
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        if args.tpu is not None:
            return diagnostics.check_tpu(
                training.dataset,
                model=training.model,
                replicas=replicas,
                callbacks=training.callbacks,
                validation_data=training.validation_data,
                batch_size=training.batch_size,
                validation_batch_size=training.validation_batch_size,
                remote=args.remote,
            )
        if args.measure:
            return diagnostics.check_speed(
                training.dataset,
                model=training.model,
                callbacks=training.callbacks,
                batch_size=training.batch_size,
                seconds=seconds,
            )
        return diagnostics.check_input(
            training.dataset,
            validation_data=training.validation_data,
            model=training.model,
            workers=workers,
            epochs=training.epochs,
            steps_per_epoch=training.steps_per_epoch,
        )

    with _stdout_to_stderr():
        report = _target.checked(args.tpu or args.target, args.rest, check)
    said = json.dumps(report.to_dict(), indent=2) if args.json else str(report)
    sys.stdout.write(said + "\n")
    return 0 if report.clean else 1


def _refuse_other_flags(args: argparse.Namespace) -> None:
    if args.measure and args.tpu is not None:
        _checks.refuse(
            "Speed is measured on this machine, not on a TPU.",
            tpu=args.tpu,
            remedy="Write `kdpkit doctor --measure train.py`.",
        )
    if args.seconds is not None and not args.measure:
        _checks.refuse("`--seconds` is about `--measure`.", seconds=args.seconds)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for the report: what is printed meanwhile, also by child processes, is stderr."""
    sys.stdout.flush()
    saved = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        (sys.__stdout__ or sys.stdout).flush()  # what is left in it goes to stderr too
        os.dup2(saved, _STDOUT)
        os.close(saved)
