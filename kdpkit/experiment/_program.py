"""Recipes as programs: flags are checked before imports, and known errors are one sentence."""

import contextlib
import errno
import importlib.util
import os
import re
import signal
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kdpkit import errors
from kdpkit._internal import checks

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# TensorFlow 2.20 and later write how they were built, and that there is no GPU, whatever
# TF_CPP_MIN_LOG_LEVEL says (tensorflow/tensorflow#100442).
_BUILD_MESSAGE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} ")


def start(parser: ArgumentParser, name: str) -> None:
    """Check the flags of a program, then import Keras with its backend, which takes seconds.

    Call it above the imports of a recipe. A wrong flag, or a backend that is not installed, ends
    the program with one sentence; `--help` ends it too. Until `run`, Ctrl-C ends it at once. What
    TensorFlow writes about how it was built is hidden, unless TF_CPP_MIN_LOG_LEVEL is 0.

    Args:
        parser: Parser of the recipe's flags.
        name: The recipe's `__name__`: where it is imported, as in notebooks, no flags are read.

    Raises:
        kdpkit.errors.InputError: The backend is not installed, where the recipe is imported.
    """
    is_program = name == "__main__" and "ipykernel" not in sys.modules
    with _ending_in_one_sentence() if is_program else contextlib.nullcontext():
        if is_program:
            parser.parse_args()
            # Libraries catch a KeyboardInterrupt, or crash, while they are loaded. A program in the
            # background, which ignores Ctrl-C, goes on doing so.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            with _without_build_messages():
                importlib.import_module("keras")
                # `keras.utils.set_random_seed`, which recipes call, imports it on JAX as well.
                if importlib.util.find_spec("tensorflow"):
                    importlib.import_module("tensorflow")
        except ModuleNotFoundError as error:
            if error.name not in ("jax", "tensorflow"):
                raise
            extra = "jax" if error.name == "jax" else "recipes"
            raise errors.PackageInputError(
                f"`{error.name}` is not installed. Run `{checks.install_command(extra)}`."
            ) from error


def run(main: Callable[[], Any]) -> None:
    """Run a recipe's `main` as a program: a known error ends it with one sentence.

    The exit code is 2 for invalid input, 43 if another process is gone, 130 after Ctrl-C, and 1 if
    the disk is full. Other errors keep their traceback. Without arguments `main` takes its flags
    from the command line.
    """
    from kdpkit._internal import processes

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `start`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with _ending_in_one_sentence(processes.leave_without_waiting), processes.explain_lost_process():
        main()


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
        if error.errno not in _DISK_IS_FULL:
            raise
        file = f"{error.filename}: " if error.filename else ""
        reason = f"No space is left ({file}{error.strerror})."
        code, sentence = 1, f"{reason} Make room; what was written before is complete."
    except KeyboardInterrupt as interrupt:
        code, sentence = 130, str(interrupt)  # of `Resume`, which names the state that it saved
        if not sentence:
            sentence = "Stopped by Ctrl-C."
            print(end="\n" * sys.stdout.isatty())  # Keras' bar has left its line open
    before(code)
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def _without_build_messages() -> Iterator[None]:
    """Hold back what the block writes to stderr, and write it later without messages of a build."""
    level = "2" if Path("/proc/driver/nvidia").exists() else "3"  # 2 shows errors, as CUDA's
    wants_all = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level) == "0"
    with contextlib.ExitStack() as stack:
        if wants_all or sys.stderr is None:
            yield
            return
        with contextlib.suppress(OSError):  # without room for a file, nothing is held back
            held = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore_stderr, held, os.dup(2))
            sys.stderr.flush()
            os.dup2(held.fileno(), 2)
        yield


def _restore_stderr(held: IO[bytes], stderr: int) -> None:
    sys.stderr.flush()
    os.dup2(stderr, 2)
    os.close(stderr)
    held.seek(0)
    os.write(2, b"".join(line for line in held if not _BUILD_MESSAGE.match(line)))
