"""`kdpkit doctor`: what stands in the way of training on a TPU, known before there is one."""

import argparse
import contextlib
import json
import sys

from kdpkit import _checks

HELP = "find what would stop or slow training on a TPU, on this machine"

_EXAMPLE = """\
TARGET is a script, which runs up to its first `fit` and trains nothing, or `module:name` or
`file.py:name` of a dataset, or of a function that gives a dataset or (dataset, model):

    kdpkit doctor --tpu recipes/cnn_jax.py -- --per-replica-batch-size 256
    KERAS_BACKEND=jax kdpkit doctor --tpu train.py:make_dataset --json

Exit code 0: nothing found, or notes alone; 1: findings; 2: the target cannot be checked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what to check, and for which TPU."""
    parser.usage = "kdpkit doctor --tpu TARGET [flags] [-- arguments of the script]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add("--tpu", metavar="TARGET", help="check this for a TPU")
    add(
        "--replicas",
        type=int,
        default=8,
        metavar="N",
        help="cores that share a global batch (default: %(default)s)",
    )
    add(
        "--remote",
        action="store_true",
        help="the TPU is reached over the network, and reads no disk of this machine (TensorFlow)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; give 0 if it is clean, else 1."""
    if args.tpu is None:
        _checks.refuse(
            "`kdpkit doctor` checks programs for TPUs.",
            remedy="Write `kdpkit doctor --tpu train.py`.",
        )
    replicas = _checks.integer("replicas", args.replicas)
    from kdpkit.diagnostics import _target

    training = _target.training_of(args.tpu, args.rest)
    from kdpkit import diagnostics

    with contextlib.redirect_stdout(sys.stderr):  # of a dataset or model that prints
        report = diagnostics.check_tpu(
            training.dataset,
            model=training.model,
            replicas=replicas,
            callbacks=training.callbacks,
            validation_data=training.validation_data,
            batch_size=training.batch_size,
            remote=args.remote,
        )
    said = json.dumps(report.to_dict(), indent=2) if args.json else str(report)
    sys.stdout.write(said + "\n")
    return 0 if report.clean else 1
