"""The command line: `kdpkit launch`, `kdpkit doctor`, and what else stands in `kdpkit/_commands`.

A mistake in the flags is one sentence on stderr, and exit code 2.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from kdpkit import __version__, _checks

_COMMANDS = ("data-service", "doctor", "launch")  # each is a file in kdpkit/_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and give its exit code.

    >>> main(["launch", "--workers", "1", "--", "echo", "hello"])
    worker 0 | hello
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    try:
        args = _parser().parse_args(words[:split])
        args.rest = words[split + 1 :]
        return int(args.run(args))
    except _checks.InputError as error:
        sys.stderr.write(f"kdpkit: {error}\n")
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, in place of printing the usage and leaving Python."""
        raise _checks.InputError(
            f"{message.rstrip('.')}. What there is, `{self.prog} --help` lists."
        )


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
        command.set_defaults(run=module.run)
    return parser
