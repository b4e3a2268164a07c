"""`kdpkit env`: what this machine and its Python offer for training."""

import argparse
import sys

HELP = "versions and devices of this machine, and what is wrong"

EXAMPLE = """\
The report names no host and no user, so that it can go into an issue; what a
framework raised may name directories:

    kdpkit env
    kdpkit env --try

Exit code 0: nothing is wrong, or only notes; 1: findings, or a strategy that
fails or takes too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    trials = "train two steps with every strategy, and compare them with one device's"
    add("--try", action="store_true", dest="try_strategies", help=trials)
    timeout = "for TensorFlow and JAX to answer, and for each strategy (default: %(default)s)"
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    from kdpkit import diagnostics

    report = diagnostics.environment(
        try_strategies=args.try_strategies,
        timeout_seconds=args.timeout,
        on_start=lambda name: print(f"Trying {name} ...", file=sys.stderr, flush=True),
    )
    print(report)
    return 0 if report.clean else 1
