"""`kdpkit probe`: two training steps in every way, to see which work here."""

import argparse
import json
import sys
from typing import Any

from kdpkit._commands import _telling

HELP = "train two steps with every strategy and backend, to see which work here"

_EXAMPLE = """\
NAME is one, mirrored, multi_worker, parameter_server or tpu (TensorFlow),
jax_one or jax_mesh, or tensorflow or jax for all of a backend. Each runs in
processes of its own and is held against one device:

    kdpkit probe
    kdpkit probe --only mirrored jax --timeout 60 --json

Exit code 0: all that this machine could do works; 1: something failed, or took
too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what `kdpkit.diagnostics.probe` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
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
    """Print the table; give 0 if all that could work does, else 1."""
    from kdpkit import diagnostics

    with _telling.telling("Trying") as say:
        report = diagnostics.probe(args.only, timeout_seconds=args.timeout, on_start=say)
    if args.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    elif sys.stdout.isatty():
        _draw(report)
    else:
        sys.stdout.write(f"{report}\n")
    return 0 if report.works else 1


def _draw(report: Any) -> None:
    """Draw the table in colours."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"works": "green", "cannot": "dim", "failed": "red", "timed out": "red"}
    table = Table("strategy", "backend", "result", "seconds", "where, or why not")
    for result in report.results:
        table.add_row(
            result.name,
            result.backend,
            Text(result.result, style=colours[result.result]),
            "-" if result.seconds is None else f"{result.seconds:.1f}",
            Text("\n".join(filter(None, [result.where, result.reason]))),
        )
    Console().print(table)
