"""`kdpkit launch`: start the processes of a cluster on this machine."""

import argparse
import dataclasses
import json
import shlex
import sys

from kdpkit import launch
from kdpkit._internal import checks

TAKES_REST = True
HELP = "run a command as several processes of this machine that train together"

EXAMPLE = """\
Every process runs the command, and finds its role in the cluster in its
environment:

    kdpkit launch --workers 2 -- python train.py --epochs 3
    kdpkit launch --workers 2 --parameter-servers 1 --dry-run -- python train.py

Exit code: that of the process that failed first, else 0."""

_FLAGS: list[tuple[str, type, float | None, str]] = [
    ("--workers", int, None, "processes that train"),
    ("--parameter-servers", int, 0, "processes that hold variables; a chief is started too"),
    ("--max-restarts", int, 0, "how often processes are started again when one fails"),
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
    parser.add_argument(
        "--listen",
        default="loopback",
        choices=["loopback", "all"],
        help="interfaces that the processes' servers listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what each process would get, start none"
    )


def run(args: argparse.Namespace) -> int:
    """Launch; with `--json` stdout has only the report, and what processes print is on stderr."""
    if not args.rest:
        checks.fail(
            "The command to run comes after `--`.",
            remedy="Write `kdpkit launch --workers 2 -- python train.py`.",
        )
    names = ("workers", "parameter_servers", "gpus_per_worker", "listen")
    what = {name: getattr(args, name) for name in names}
    if args.dry_run:
        _show(launch.tasks(args.rest, **what), as_json=args.json)
        return 0
    report = launch.launch(
        args.rest,
        **what,
        max_restarts=args.max_restarts,
        grace_seconds=args.grace_seconds,
        stdout=sys.stderr if args.json else None,
    )
    if args.json:
        _write(dataclasses.asdict(report))
    return report.exit_code


def _show(tasks: tuple[launch.Task, ...], *, as_json: bool) -> None:
    if as_json:
        _write([{"name": t.name, "command": t.command, "variables": t.variables} for t in tasks])
        return
    for task in tasks:
        words = (f"{name}={shlex.quote(text)}" for name, text in task.variables.items())
        sys.stdout.write(f"{task.name} | {' '.join(words)} {shlex.join(task.command)}\n")


def _write(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")
