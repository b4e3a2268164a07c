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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kdpkit launch --workers N [flags] -- command ..."
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="processes that train")
    servers = "processes that hold variables; a chief is started too (default: %(default)s)"
    add("--parameter-servers", type=int, default=0, metavar="N", help=servers)
    restarts = "how often all start again when one fails (default: %(default)s)"
    add("--max-restarts", type=int, default=0, metavar="N", help=restarts)
    gpus = "GPUs that each worker sees (default: all)"
    add("--gpus-per-worker", type=int, metavar="N", help=gpus)
    grace = "between SIGTERM and SIGKILL (default: %(default)s)"
    add("--grace-seconds", type=float, default=30.0, metavar="SECONDS", help=grace)


def run(args: argparse.Namespace) -> int:
    if not args.rest:
        checks.fail(
            "The command to run comes after `--`.",
            remedy="Write `kdpkit launch --workers 2 -- python train.py`.",
        )
    return launch.launch(
        args.rest,
        workers=args.workers,
        parameter_servers=args.parameter_servers,
        max_restarts=args.max_restarts,
        gpus_per_worker=args.gpus_per_worker,
        grace_seconds=args.grace_seconds,
    )
