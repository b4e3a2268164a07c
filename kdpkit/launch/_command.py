"""`kdpkit launch`: start the processes of a cluster on this machine."""

import argparse

from kdpkit import launch
from kdpkit._internal import checks

TAKES_REST = True
HELP = "run a command as several processes of this machine that train together"

EXAMPLE = """\
Every process runs the command, and finds its role in the cluster in its
environment:

    kdpkit launch --workers 2 -- python train.py --epochs 3

Exit code: that of the process that failed first, else 0."""

_FLAGS: list[tuple[str, type, float | None, str]] = [
    ("--workers", int, None, "processes that train"),
    ("--parameter-servers", int, 0, "processes that hold variables; a chief is started too"),
    ("--max-restarts", int, 0, "how often all processes are started again when one fails"),
    ("--gpus-per-worker", int, None, "GPUs that each worker sees (default: all)"),
    ("--grace-seconds", float, 30.0, "between SIGTERM and SIGKILL"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what `kdpkit.launch.launch` takes."""
    parser.usage = "kdpkit launch --workers N [flags] -- command ..."
    for name, kind, default, help_text in _FLAGS:
        shown = "" if default is None else " (default: %(default)s)"
        parser.add_argument(
            name,
            type=kind,
            default=default,
            required=name == "--workers",
            metavar="N",
            help=help_text + shown,
        )


def run(args: argparse.Namespace) -> int:
    """Launch, and return the exit code."""
    if not args.rest:
        checks.fail(
            "The command to run comes after `--`.",
            remedy="Write `kdpkit launch --workers 2 -- python train.py`.",
        )
    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in _FLAGS]
    return launch.launch(args.rest, **{name: getattr(args, name) for name in names})
