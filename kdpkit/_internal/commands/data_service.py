"""`kdpkit data-service`: prepare examples of programs that train, in a process."""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import queue
import signal
import sys
from collections.abc import Sequence

from kdpkit import errors
from kdpkit._internal import checks, signal_handlers

HELP = "prepare the examples of programs that train, in this process"

EXAMPLE = """\
Trainers name it in `services` of `kdpkit.pipelines.train_pipeline`:

    kdpkit data-service --port 5050
    kdpkit data-service --port 5050 --host 10.0.0.7 --import tensorflow_text

It serves until SIGTERM or Ctrl-C; the exit code is 128 and the signal's number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Name where to serve, and with what."""
    add = parser.add_argument
    add("--port", type=int, required=True, metavar="P", help="where it listens; 0 takes a free one")
    add(
        "--worker-port",
        type=int,
        default=0,
        metavar="P",
        help="where examples are fetched (default: a free one)",
    )
    add(
        "--host",
        default="localhost",
        metavar="NAME",
        help="the name under which trainers on other machines reach this one; it then listens on "
        "all interfaces (default: %(default)s, for this machine alone)",
    )
    add(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a package whose operations are needed, such as tensorflow_text; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return 128 and the signal's number, as a shell does."""
    if importlib.util.find_spec("tensorflow") is None:
        checks.fail(
            "`kdpkit data-service` needs TensorFlow, which is not installed.",
            remedy="Run `pip install kdpkit[tensorflow]`.",
        )
    _import(args.modules)
    from kdpkit import pipelines

    came: queue.SimpleQueue[int] = queue.SimpleQueue()
    with (
        signal_handlers.handling(lambda number, _: came.put(number), signal.SIGTERM, signal.SIGINT),
        pipelines.data_service(args.port, host=args.host, worker_port=args.worker_port) as service,
    ):
        sentence = f"Serves at {service.address}; examples come from {service.worker_address}."
        where = json.dumps(dataclasses.asdict(service))
        sys.stdout.write((where if args.json else sentence) + "\n")
        sys.stdout.flush()
        return 128 + came.get()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a package may fail in any way
            raise errors.InputError(
                f"`--import {module}` fails: {type(error).__name__}: {error}. Name a package that "
                "Python finds here, as in `import` statements."
            ) from error
