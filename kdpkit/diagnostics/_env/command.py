"""`kdpkit env`: what this machine and its Python give a training."""

import argparse
import json
import sys

HELP = "versions, devices, strategies and settings of this machine, and what is amiss"

_EXAMPLE = """\
The report holds no path, no host's name and no secret, so that it can go into
an issue:

    kdpkit env
    kdpkit env --quick --json

Exit code 0: nothing is amiss, or notes alone; 1: findings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what `kdpkit.diagnostics.environment` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="start neither TensorFlow nor JAX, and so count no devices of theirs",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for TensorFlow and JAX to answer (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; give 0 if nothing is amiss, else 1."""
    from kdpkit import diagnostics

    found = diagnostics.environment(start_frameworks=not args.quick, timeout_seconds=args.timeout)
    said = json.dumps(found.to_dict(), indent=2) if args.json else str(found)
    sys.stdout.write(said + "\n")
    return 0 if found.clean else 1
