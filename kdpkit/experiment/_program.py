"""Recipes as programs: flags before imports, and exit codes."""

import contextlib
import errno
import importlib
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.experiment import _framework_messages

_PACKAGES = ("jax", "keras_hub", "matplotlib", "sklearn", "tensorflow", "tensorflow_text")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def program(parser: ArgumentParser, name: str) -> Iterator[None]:
    """Check the flags of a program, then import its frameworks, which takes seconds.

    A wrong flag, or a package that is not installed, ends the program with one sentence; `--help`
    ends it too, and Ctrl-C at once. What TensorFlow writes about how it was built is hidden, unless
    TF_CPP_MIN_LOG_LEVEL is 0.

    Args:
        parser: Parser of the recipe's flags.
        name: The recipe's `__name__`: where it is imported, as in notebooks, no flags are read.

    Raises:
        kdpkit.errors.PackageInputError: A package is not installed, where the recipe is imported.
    """
    with contextlib.ExitStack() as stack:
        if name == "__main__" and "ipykernel" not in sys.modules:
            stack.enter_context(_ending_in_one_sentence())
            parser.parse_args()
            stack.enter_context(_ending_at_once_by_ctrl_c())
        try:
            with _framework_messages.hidden():
                yield
                importlib.import_module("kdpkit.experiment._recorder")  # with its frameworks
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise
            extra = "jax" if error.name == "jax" else "recipes"
            raise errors.PackageInputError(
                f"`{error.name}` is not installed. Run `{checks.install_command(extra)}`."
            ) from error


def run(main: Callable[[], Any]) -> None:
    """Run a recipe's `main` as a program: invalid input ends with one sentence.

    The exit code is 2 for invalid input (`kdpkit.errors.InputError`), 130 after Ctrl-C, 43 if
    another process was lost, 1 with one sentence if a disk is full, else Python's own: 0, or 1 with
    the traceback of any other error.

    Without arguments `main` takes its flags from the command line.
    """
    from kdpkit._internal import processes

    with _ending_in_one_sentence(processes.leave_without_waiting), processes.explain_lost_process():
        main()


@contextlib.contextmanager
def _ending_at_once_by_ctrl_c() -> Iterator[None]:
    """Have the system end the process: libraries catch an exception, or crash, as they are loaded.

    A program in the background, which ignores Ctrl-C, goes on doing so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _ending_in_one_sentence(before: Callable[[int], object] = int) -> Iterator[None]:
    try:
        yield
        return
    except errors.InputError as error:
        code, sentence = 2, str(error)
    except errors.ProcessLostError as error:
        code, sentence = errors.LEFT_ALONE, str(error)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        code, file = 1, f"{error.filename}: " if error.filename else ""
        reason = f"No space is left ({file}{error.strerror})."
        sentence = f"{reason} Make room; what was written before is complete."
    except KeyboardInterrupt as interrupt:  # `Resume` names the state that it has saved
        code, sentence = 130, str(interrupt) or "Stopped by Ctrl-C."
    before(code)
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    raise SystemExit(code)
