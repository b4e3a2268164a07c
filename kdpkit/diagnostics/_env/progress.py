"""What a command reports on stderr while it is at work."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def reporting(verb: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports what is being done: on a terminal in place, else in lines."""
    if not sys.stderr.isatty():
        yield lambda what: print(f"{verb} {what} ...", file=sys.stderr, flush=True)  # noqa: T201
        return
    from rich.console import Console

    with Console(stderr=True).status("Starting ...") as status:
        yield lambda what: status.update(f"{verb} {what} ...")
