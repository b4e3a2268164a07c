"""The flags that all recipes share."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kdpkit import errors, scaling
from kdpkit._internal import storage

_CORPORA = ("builtin", "mnist", "fashion_mnist")  # the names that `kdpkit.corpora` knows
_STRATEGIES = ("auto", "one", "mirrored", "multi_worker", "parameter_server", "tpu")
_SMOKE = {"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8, "jit": "off"}


def argument_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a recipe's parser, with the flags that all recipes share.

    Add the recipe's own flags with `add_argument`. An invalid flag raises a `ValueError` with one
    sentence, which a notebook shows and a program prints. Directories to write to are created and
    tried when they are parsed, so that a long run does not fail at its end. All paths may be in
    object storage, such as `gs://bucket/logs`. `--smoke` changes the defaults to those of a run of
    a few steps.

    Args:
        description: What `--help` shows above the flags, usually the recipe's `__doc__`.
        **defaults: Those of `epochs`, `per_replica_batch_size` and `base_learning_rate`, and of
            other flags.

    >>> parser = argument_parser(
    ...     "Trains.", epochs=5, per_replica_batch_size=32, base_learning_rate=1e-4
    ... )
    >>> args = parser.parse_args(["--smoke", "--steps-per-epoch", "7"])
    >>> args.epochs, args.steps_per_epoch
    (2, 7)
    """
    common = {"strategy": "auto", "data": "builtin", "rule": "linear", "seed": 0}
    parser = _Parser(description)
    parser.set_defaults(**common | defaults)
    _add_common_flags(parser.add_argument)
    return parser


def _add_common_flags(add: Callable[..., Any]) -> None:
    kinds = "tpu is for JAX, and auto takes all devices of the best kind"
    add("--strategy", choices=_STRATEGIES, help=kinds)
    replicas = (
        "number of synchronous replicas; without as many GPUs the CPU is split into N logical "
        "devices (default: what the strategy finds)"
    )
    add("--replicas", type=positive_integer, metavar="N", help=replicas)
    add("--data", type=_data, metavar="builtin|PATH|NAME", help="what to train on")
    add("--epochs", type=positive_integer, help="passes over the data")
    steps = "global batches in an epoch (default: all the data)"
    add("--steps-per-epoch", type=positive_integer, metavar="STEPS", help=steps)
    size = {"type": positive_integer, "metavar": "EXAMPLES"}
    add("--per-replica-batch-size", **size, help="examples in a replica's batch")
    global_size = (
        "for a run whose number of replicas changes: examples in a batch over all of them, to "
        "which the learning rate is scaled (default: --per-replica-batch-size for each)"
    )
    add("--global-batch-size", **size, help=global_size)
    rate = "learning rate for one replica's batch"
    add("--base-learning-rate", type=_positive_number, metavar="RATE", help=rate)
    add("--rule", choices=scaling.RULES, help="how the rate grows with the replicas")
    add("--seed", type=_seed, help="seed of all random numbers, below 2**32")
    directory = {"type": writable_directory, "metavar": "DIRECTORY"}
    logs = "for TensorBoard files, and for the model"
    add("--log-dir", **directory, help=logs)
    add("--resume", **directory, help="directory of the training state, to resume from")
    add("--results", type=_writable_file, metavar="FILE", help="write the results as JSON")
    add("--smoke", action="store_true", help="run for a few steps, as a test")


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors, and whose flag `--smoke` changes the defaults of others."""

    def __init__(self, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add a flag, and its default to its help."""
        action = super().add_argument(*names, **settings)
        if not any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS)):
            action.help = f"{action.help or ''} (default: %(default)s)".lstrip()
        return action

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; with `--smoke` parse again with its settings as defaults."""
        parsed, rest = super().parse_known_args(args, namespace)
        if not parsed.smoke:
            return parsed, rest
        return super().parse_known_args(args, argparse.Namespace(**_SMOKE))

    def error(self, message: str) -> NoReturn:
        raise errors.InputError(f"{message.rstrip('.')}. The flags are listed by --help.")


def _number(
    kind: Callable[[str], Any], description: str, is_valid: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Return a `type` for `add_argument`, whose error says what the flag must be."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {description}. Received: {text!r}")
        return value

    return parse


positive_integer = _number(int, "a positive integer", lambda value: value > 0)
positive_integer.__doc__ = "Parse a positive integer, for `add_argument(type=...)`."
_positive_number = _number(float, "a positive number", lambda value: 0 < value < math.inf)
_seed = _number(int, "an integer from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)


def _data(text: str) -> str:
    if text not in _CORPORA and not _path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no such file or directory. Received: {text!r}")
    return text


def _path(text: str) -> storage.AnyPath:
    try:
        return storage.path(text)
    except errors.InputError as error:
        raise argparse.ArgumentTypeError(f"{error} Received: {text!r}") from error


def writable_directory(text: str) -> storage.AnyPath:
    """Parse a directory, which is created and tried, for `add_argument(type=...)`."""
    directory = _path(text)
    try:
        storage.make_writable(directory)
    except errors.InputError as error:
        raise argparse.ArgumentTypeError(f"{error} Received: {text!r}") from error
    return directory


def _writable_file(text: str) -> storage.AnyPath:
    file = _path(text)
    if file.exists() and not file.is_file():
        raise argparse.ArgumentTypeError(f"a regular file is needed. Received: {text!r}")
    writable_directory(str(file.parent))
    return file
