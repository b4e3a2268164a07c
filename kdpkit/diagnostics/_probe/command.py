"""`kdpkit probe`: two training steps with every strategy, to see which work here."""

import argparse

from kdpkit._internal import progress

HELP = "train two steps with every strategy and backend, to see which work here"

EXAMPLE = """\
NAME is one, mirrored, multi_worker, parameter_server or tpu (TensorFlow),
jax_one or jax_mesh, or tensorflow or jax for all of a backend. Each runs in
processes of its own and is compared with one device:

    kdpkit probe
    kdpkit probe --only mirrored jax --timeout 60 --json

Exit code 0: all that this machine could do works; 1: something failed, or took
too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kdpkit.diagnostics.probe`."""
    add = parser.add_argument
    add("--only", nargs="+", default=(), metavar="NAME", help="try these (default: all)")
    add(
        "--timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="for each of them, after which it is ended (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0 if all that could work does, else 1."""
    from kdpkit import diagnostics
    from kdpkit.diagnostics import _text

    with progress.reporting("Trying") as say:
        report = diagnostics.probe(args.only, timeout_seconds=args.timeout, on_start=say)
    _text.show(report, as_json=args.json)
    return 0 if report.works else 1
