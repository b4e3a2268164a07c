"""`kdpkit env`: what this machine and its Python offer for training."""

import argparse
import sys

HELP = "versions, devices and settings of this machine, and what is wrong"

EXAMPLE = """\
The report holds no path, no host's name and no secret, so that it can go into
an issue:

    kdpkit env
    kdpkit env --try
    kdpkit env --quick --json

Exit code 0: nothing is wrong, or only notes; 1: findings, or a strategy that
fails or takes too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kdpkit.diagnostics.environment`."""
    add = parser.add_argument
    quick = "start neither TensorFlow nor JAX, and do not count their devices"
    add("--quick", action="store_true", help=quick)
    trials = "train two steps with every strategy, and compare them with one device's"
    add("--try", action="store_true", dest="try_strategies", help=trials)
    timeout = "for TensorFlow and JAX to answer, and for each strategy (default: %(default)s)"
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if nothing is wrong, else 1."""
    from kdpkit import diagnostics
    from kdpkit.diagnostics import _text

    found = diagnostics.environment(
        start_frameworks=not args.quick,
        try_strategies=args.try_strategies,
        timeout_seconds=args.timeout,
        on_start=lambda name: print(f"Trying {name} ...", file=sys.stderr, flush=True),  # noqa: T201
    )
    _text.show(found, as_json=args.json)
    return 0 if found.clean else 1
