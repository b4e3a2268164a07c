"""The common flags of the recipes, and types for a recipe's own flags."""

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kdpkit import errors, scaling
from kdpkit._internal import checks, storage, writable

Number = TypeVar("Number", int, float)

_DEFAULT = "(default: %(default)s)"


def argument_parser(
    description: str | None,
    *,
    epochs: int,
    per_replica_batch_size: int,
    base_learning_rate: float,
    rule: str = "linear",
    smoke: Mapping[str, Any] | None = None,
    published: Mapping[str, Any] | None = None,
) -> argparse.ArgumentParser:
    """Return a recipe's parser, with the flags that all recipes share.

    Add the recipe's own flags with `add_argument`. An invalid flag raises a `ValueError` with one
    sentence, which a notebook shows and `run` prints. `--results` and `--log-dir` are created and
    tried when they are parsed, so a long run does not fail at its end. All paths may be in object
    storage, such as `gs://bucket/logs`.

    Args:
        description: What `--help` shows above the flags, usually the recipe's `__doc__`.
        epochs: Default of `--epochs`; the next three are defaults of the flags with their names.
        per_replica_batch_size: Examples in a batch on each replica.
        base_learning_rate: Learning rate for one replica's batch.
        rule: How the rate grows with the replicas.
        smoke: Settings of `--smoke` by flag, for a run of a few seconds; explicit flags take
            precedence.
        published: Settings of `--published`, those of the guide that the recipe is about; without
            them there is no such flag.

    >>> settings = {"epochs": 5, "per_replica_batch_size": 32, "base_learning_rate": 1e-4}
    >>> parser = argument_parser("Trains.", **settings, smoke={"epochs": 1, "steps_per_epoch": 4})
    >>> args = parser.parse_args(["--smoke", "--steps-per-epoch", "7"])
    >>> args.epochs, args.steps_per_epoch
    (1, 7)
    """
    parser = _Parser(description, smoke=smoke or {}, published=published or {})
    _add_training_flags(parser.add_argument)
    _add_file_flags(parser.add_argument)
    parser.add_argument("--smoke", action="store_true", help="run for a few seconds, as a test")
    if published:
        what = "train with the published hyperparameters"
        parser.add_argument("--published", action="store_true", help=what)
    parser.set_defaults(
        epochs=epochs,
        per_replica_batch_size=per_replica_batch_size,
        base_learning_rate=base_learning_rate,
        rule=rule,
    )
    return parser


def _add_training_flags(add: Callable[..., argparse.Action]) -> None:
    add(
        "--strategy",
        default="auto",
        metavar="KIND",
        help="one, mirrored, multi_worker, parameter_server, tpu, or auto: a TPU, else all GPUs, "
        f"else one device {_DEFAULT}",
    )
    add(
        "--replicas",
        type=positive_integer,
        metavar="N",
        help="number of synchronous replicas; the CPU, or a single GPU, is split into N logical "
        "devices (default: what the strategy finds)",
    )
    add("--data", default="builtin", metavar="builtin|PATH|NAME", help="what to train on")
    add("--epochs", type=positive_integer, help=_DEFAULT)
    add(
        "--steps-per-epoch",
        type=positive_integer,
        metavar="STEPS",
        help="global batches in an epoch (default: all the data)",
    )
    add("--per-replica-batch-size", type=positive_integer, metavar="EXAMPLES", help=_DEFAULT)
    add(
        "--global-batch-size",
        type=positive_integer,
        metavar="EXAMPLES",
        help="for a run whose number of replicas changes: examples in a batch over all of them, to "
        "which the learning rate is scaled (default: --per-replica-batch-size for each)",
    )
    add(
        "--base-learning-rate",
        type=positive_number,
        metavar="RATE",
        help=f"learning rate for one replica's batch {_DEFAULT}",
    )
    add("--rule", choices=scaling.RULES, help=f"how the rate grows with the replicas {_DEFAULT}")
    add("--seed", type=_seed, default=0, help=f"seed of all random numbers {_DEFAULT}")


def _add_file_flags(add: Callable[..., argparse.Action]) -> None:
    add(
        "--log-dir",
        type=_writable_directory,
        metavar="DIRECTORY",
        help="for TensorBoard files, and for the model if Ctrl-C ends training (default: none)",
    )
    add(
        "--resume",
        type=_writable_directory,
        metavar="DIRECTORY",
        help="directory of the training state, to resume from (default: none)",
    )
    add("--results", type=_writable_file, metavar="FILE", help="write the results as JSON")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    add(
        "--cache-dir",
        type=storage.path,
        default=caches / "kdpkit",
        metavar="DIRECTORY",
        help=f"directory of cached data {_DEFAULT}",
    )


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors, and whose other defaults have flags: `--smoke`, for one."""

    def __init__(self, description: str | None, **settings: Mapping[str, Any]) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._settings = settings  # by flag; of several that are given the first counts

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; if a flag for other defaults is given, parse again with these."""
        parsed, rest = super().parse_known_args(args, namespace)
        defaults: dict[str, Any] = {}
        for flag, settings in self._settings.items():
            if getattr(parsed, flag, False):
                defaults = {**settings, **defaults}
                if unknown := settings.keys() - vars(parsed).keys():
                    what = f"`{flag}` sets flags that the recipe does not have."
                    checks.fail(what, flags=sorted(unknown))
        if not defaults:
            return parsed, rest
        return super().parse_known_args(args, argparse.Namespace(**defaults))

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing the usage and exiting."""
        raise errors.InputError(f"{message.rstrip('.')}. The flags are listed by --help.")


def positive_integer(text: str) -> int:
    """Parse a positive integer, for `add_argument(type=...)`."""
    return _parsed(text, int, "a positive integer", lambda number: number > 0)


def count(text: str) -> int:
    """Parse a non-negative integer."""
    return _parsed(text, int, "a non-negative integer", lambda number: number >= 0)


def _seed(text: str) -> int:
    """Parse a seed that NumPy also accepts."""
    return _parsed(text, int, "an integer from 0 to 2**32 - 1", lambda seed: 0 <= seed < 1 << 32)


def positive_number(text: str) -> float:
    """Parse a positive number."""
    return _parsed(text, float, "a positive number", lambda number: 0 < number < math.inf)


def _parsed(
    text: str, parse: Callable[[str], Number], kind: str, is_valid: Callable[[Number], bool]
) -> Number:
    """Parse a flag's value; argparse adds the flag's name to the error."""
    with contextlib.suppress(ValueError):
        if is_valid(value := parse(text)):
            return value
    raise argparse.ArgumentTypeError(f"must be {kind}. Received: {text!r}")


def _writable_directory(text: str) -> storage.AnyPath:
    with _flag_errors(text):
        directory = storage.path(text)
        writable.make(directory)
        return directory


def _writable_file(text: str) -> storage.AnyPath:
    with _flag_errors(text):
        file = storage.path(text)
        if file.exists() and not file.is_file():
            checks.fail_for_file("A regular file is needed", file)
        writable.make(file.parent)
        return file


@contextlib.contextmanager
def _flag_errors(text: str) -> Iterator[None]:
    """Raise invalid input as the error type that argparse reports with the flag's name."""
    try:
        yield
    except errors.InputError as error:
        raise argparse.ArgumentTypeError(f"{error} Received: {text!r}") from error
