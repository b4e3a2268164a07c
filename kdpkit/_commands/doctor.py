"""`kdpkit doctor`: mistakes in the input of a training, or what a TPU would not take of it."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from kdpkit import _checks

TAKES_REST = True
HELP = "find mistakes in a training's input, or what would stop or slow it on a TPU"
_STDOUT, _STDERR = 1, 2  # file descriptors

_EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or `module:name` or
`file.py:name` of a dataset, or of a function that gives a dataset or (dataset, model):

    kdpkit doctor train.py -- --epochs 3
    kdpkit doctor --tpu recipes/cnn_jax.py -- --per-replica-batch-size 256
    KERAS_BACKEND=jax kdpkit doctor --tpu train.py:make_dataset --json

Exit code 0: nothing found, or notes alone; 1: findings; 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what to check, and for what."""
    parser.usage = "kdpkit doctor [--tpu] TARGET [flags] [-- arguments of the script]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="check the tf.data pipelines of this")
    add("--tpu", metavar="TARGET", help="check this for a TPU")
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
    replicas = _checks.integer("replicas", args.replicas)
    workers = _checks.integer("workers", args.workers)
    from kdpkit.diagnostics import _target

    def check(training: Any) -> Any:
        from kdpkit import diagnostics  # loads Keras, whose backend the target has chosen

        if args.tpu is None:
            return diagnostics.check_input(
                training.dataset,
                validation_data=training.validation_data,
                model=training.model,
                workers=workers,
                epochs=training.epochs,
                steps_per_epoch=training.steps_per_epoch,
            )
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

    with _stdout_to_stderr():
        report = _target.checked(args.tpu or args.target, args.rest, check)
    said = json.dumps(report.to_dict(), indent=2) if args.json else str(report)
    sys.stdout.write(said + "\n")
    return 0 if report.clean else 1


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
