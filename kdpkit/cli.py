"""The command line: `kdpkit launch`, `kdpkit doctor`, and the other commands.

An invalid flag is reported in one sentence on stderr, with exit code 2.
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
from typing import NoReturn

from kdpkit import __version__, errors
from kdpkit.launch import _output

__all__ = ["main"]

_COMMANDS = {  # name: module
    "doctor": "diagnostics._doctor.command",
    "env": "diagnostics._env.command",
    "launch": "launch._command",
    "plan": "diagnostics._plan.command",
    "recipe": "_recipe_command",
}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of `kdpkit ... >file` on a full disk


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 130 after Ctrl-C.

    Without `argv` it uses the arguments of this process, and exits when the command has ended,
    without waiting for threads that a program left running.

    >>> main(["launch", "--workers", "1", "--", "echo", "hello"])
    worker 0 | hello
    0
    """
    if argv is not None:
        return _run([*argv])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    code = _run([*sys.argv[1:]])
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a program may print while Python exits
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    if threads != [threading.main_thread()]:
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(words: list[str]) -> int:
    split = words.index("--") if "--" in words else len(words)
    try:
        parser = _parser()
        if not words:
            parser.print_help()
            return 0
        args, unknown = parser.parse_known_args(words[:split])
        if unknown:
            of_program = "; those of a program come after `--`" if args.takes_rest else ""
            problem = f"unrecognized arguments: {' '.join(unknown)}{of_program}"
            _fail(f"kdpkit {args.command}", problem)
        args.rest = words[split + 1 :]
        if args.rest and not args.takes_rest:
            _fail(f"kdpkit {args.command}", f"it takes nothing after `--`: {args.rest[0]}")
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `kdpkit ... | head`, which is not an error
        _output.discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except errors.InputError as error:
        sys.stderr.write(f"kdpkit: {error}\n")
        return 2
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _output.discard(sys.stdout)
        sys.stderr.write(
            f"kdpkit: The output cannot be written ({error.strerror}). Make room, or send it "
            "elsewhere.\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("kdpkit: Stopped by Ctrl-C.\n")
        return 128 + signal.SIGINT


def _fail(command: str, problem: str) -> NoReturn:
    raise errors.InputError(f"{problem.rstrip('.')}. See `{command} --help`.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing the usage and exiting."""
        if "invalid choice: 'lint'" in message:
            message = "`lint` is part of `kdpkit doctor TARGET`; in Python `kdpkit.pipelines.lint`"
        _fail(self.prog, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kdpkit", description="The Keras data-parallel kit.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kdpkit {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, dest="command")
    for name, path in _COMMANDS.items():
        module = importlib.import_module(f"kdpkit.{path}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, takes_rest=getattr(module, "TAKES_REST", False))
    return parser
