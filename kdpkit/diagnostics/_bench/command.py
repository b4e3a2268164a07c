"""`kdpkit bench`: how fast this machine trains, by replicas and batch sizes."""

import argparse

from kdpkit._internal import progress

HELP = "measure how fast this machine trains, by replicas and batch sizes"

_JIT: dict[str, bool | str] = {"measure": "measure", "on": True, "off": False}
_SETTINGS = (
    *("target", "workload", "replicas", "per_replica_batch_size", "global_batch_size"),
    *("backend", "split", "seconds", "rounds"),
)
EXAMPLE = """\
TARGET is `file.py:name` or `module:name` of a function that returns (dataset,
model); without it a workload of kdpkit's own is trained. Replicas are GPUs, or
logical CPUs where there are none, which share the cores; each pair of replicas
and batch size is a process of its own:

    kdpkit bench
    kdpkit bench --workload bert --replicas 1 2 4 --per-replica-batch-size 16
    kdpkit bench --global-batch-size 256 --replicas 1 2 --backend jax --json
    kdpkit bench train.py:make --seconds 20

Exit code 0: measured, or does not fit into memory; 1: something failed, or took
too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kdpkit.diagnostics.bench`."""
    parser.usage = "kdpkit bench [TARGET] [flags]"
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help="your own training, instead of a workload")
    add("--workload", help="cnn or bert (default: cnn)")
    add(
        "--replicas",
        type=int,
        nargs="+",
        metavar="R",
        help="one number or several (default: up to all GPUs, or 2 logical CPUs)",
    )
    add(
        "--per-replica-batch-size",
        type=int,
        nargs="+",
        metavar="N",
        help="examples of each replica, for weak scaling (default: 32 64 128)",
    )
    add(
        "--global-batch-size",
        type=int,
        nargs="+",
        metavar="N",
        help="examples over all replicas, for strong scaling",
    )
    add("--backend", help="tensorflow or jax (default: Keras' own choice)")
    add(
        "--jit",
        choices=_JIT,
        default="measure",
        help="compile with XLA, or take what is faster (default: measure)",
    )
    add("--split", action="store_true", help="split a single GPU for several replicas (TensorFlow)")
    _add_time(parser)


def _add_time(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="to train each pair for, besides compiling (default: %(default)s)",
    )
    add("--rounds", type=int, default=5, metavar="N", help="to divide these (default: %(default)s)")
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="for each pair in all, after which it is ended (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and the verdict; return 0 if nothing failed, else 1."""
    from kdpkit import diagnostics
    from kdpkit.diagnostics import _text

    with progress.reporting("Measuring") as say:
        report = diagnostics.bench(
            **{name: getattr(args, name) for name in _SETTINGS},
            jit=_JIT[args.jit],
            timeout_seconds=args.timeout,
            on_start=say,
        )
    _text.show(report, as_json=args.json)
    return 0 if report.works else 1
