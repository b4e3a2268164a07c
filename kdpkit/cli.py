"""The command line: `kdpkit launch`, `kdpkit doctor`, and what else stands in `kdpkit/_commands`.

A mistake in the flags is one sentence on stderr, and exit code 2.
"""

import argparse
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kdpkit import __version__, _checks

_COMMANDS = (  # each is a file in kdpkit/_commands
    *("bench", "data-service", "doctor", "env", "launch", "lr", "plan", "probe"),
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of `kdpkit ... >file` on a full disk


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and give its exit code; 130 after Ctrl-C.

    Without `argv` it is the whole process that is the command, and its words are taken. Then the
    process ends with the command, and waits for no thread that a program left behind.

    >>> main(["launch", "--workers", "1", "--", "echo", "hello"])
    worker 0 | hello
    0
    """
    if argv is not None:
        return _run([*argv])
    _prepare_streams()
    code = _run([*sys.argv[1:]])
    _leave(code)
    return code


def _prepare_streams() -> None:
    """Let every character be printed somehow, and what has no stream go nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as after `kdpkit ... >&-`
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 until the end
            setattr(sys, name, nowhere)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run(words: list[str]) -> int:
    split = words.index("--") if "--" in words else len(words)
    try:
        args, unknown = _parser().parse_known_args(words[:split])
        if unknown:
            _refuse(f"kdpkit {args.command}", f"unrecognized arguments: {' '.join(unknown)}")
        args.rest = words[split + 1 :]
        if args.rest and not args.takes_rest:
            _refuse(f"kdpkit {args.command}", f"it takes nothing after `--`: {args.rest[0]}")
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `kdpkit ... | head`: nobody reads on, which is no mistake
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except _checks.InputError as error:
        sys.stderr.write(f"kdpkit: {error}\n")
        return 2
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _discard_stdout()
        sys.stderr.write(
            f"kdpkit: The output cannot be written ({error.strerror}). Make room, or send it "
            "elsewhere.\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("kdpkit: Stopped by Ctrl-C.\n")
        return 128 + signal.SIGINT


def _discard_stdout() -> None:
    """Let what is left go nowhere, where Python would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _leave(code: int) -> None:
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a program may print while Python ends
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    if threads != [threading.main_thread()]:
        sys.stderr.flush()
        os._exit(code)


def _refuse(command: str, problem: str) -> NoReturn:
    raise _checks.InputError(f"{problem.rstrip('.')}. What there is, `{command} --help` lists.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, in place of printing the usage and leaving Python."""
        _refuse(self.prog, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kdpkit", description="The Keras data-parallel kit.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kdpkit {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, dest="command")
    for name in _COMMANDS:
        module = importlib.import_module(f"kdpkit._commands.{name.replace('-', '_')}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.set_defaults(run=module.run, takes_rest=getattr(module, "TAKES_REST", False))
    return parser
