"""`kdpkit launch`: start the processes of a cluster on this machine."""

import argparse
import dataclasses
import json
import sys

from kdpkit import launch
from kdpkit._internal import checks

TAKES_REST = True
HELP = "run a command as several processes of this machine that train together"

EXAMPLE = """\
Every process runs the command, and finds its role in the cluster in its
environment:

    kdpkit launch --workers 2 -- python train.py --epochs 3
    kdpkit launch --workers 4 --min-workers 2 -- python train.py --resume state
    kdpkit launch --workers 2 --parameter-servers 1 --dry-run -- python train.py

With --min-workers, `kill -USR1` of this command brings lost workers back.

Exit code: that of the process that failed first, else 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name what `kdpkit.launch.launch` takes."""
    parser.usage = "kdpkit launch --workers N [flags] -- command ..."
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="processes that train")
    add(
        "--min-workers",
        type=int,
        metavar="N",
        help="go on with as few where one fails and no restart is left (default: all)",
    )
    add(
        "--parameter-servers",
        type=int,
        default=0,
        metavar="M",
        help="processes that hold variables; a chief is started too (default: %(default)s)",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="how often processes are started again when one fails (default: %(default)s)",
    )
    add(
        "--gpus-per-worker", type=int, metavar="N", help="GPUs that each worker sees (default: all)"
    )
    add(
        "--grace-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="between SIGTERM and SIGKILL (default: %(default)s)",
    )
    add(
        "--start-timeout-seconds",
        type=float,
        metavar="S",
        help="to a process's first sign of life (default: without end)",
    )
    add(
        "--listen",
        default="loopback",
        choices=["loopback", "all"],
        help="interfaces that the processes' servers listen on (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="print what each process would get, start none")


def run(args: argparse.Namespace) -> int:
    """Launch; with `--json` stdout has the report alone, and what processes print is on stderr."""
    if not args.rest:
        checks.fail(
            "The command to run comes after `--`.",
            remedy="Write `kdpkit launch --workers 2 -- python train.py`.",
        )
    what = {
        "workers": args.workers,
        "parameter_servers": args.parameter_servers,
        "gpus_per_worker": args.gpus_per_worker,
        "listen": args.listen,
    }
    how = {
        "min_workers": args.min_workers,
        "max_restarts": args.max_restarts,
        "grace_seconds": args.grace_seconds,
        "start_timeout_seconds": args.start_timeout_seconds,
    }
    if not args.json:
        return launch.launch(args.rest, **what, **how, dry_run=args.dry_run)
    if args.dry_run:
        tasks = launch.plan(args.rest, **what)
        _write([{"name": t.name, "command": t.command, "variables": t.variables} for t in tasks])
        return 0
    report = launch.run(args.rest, **what, **how, stdout=sys.stderr)
    _write(dataclasses.asdict(report))
    return report.exit_code


def _write(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")
