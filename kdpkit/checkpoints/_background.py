"""Files that are written while the program goes on, each in a thread."""

import atexit
import os
import warnings
from collections.abc import Callable
from concurrent import futures

# Its threads are no daemons: a program that ends waits for what they write.
_threads = futures.ThreadPoolExecutor(thread_name_prefix="kdpkit-background")
_started: dict[str, "futures.Future[str | None]"] = {}  # by what is written


def start(path: str | os.PathLike[str], write: Callable[[], str | None]) -> None:
    """Write in a thread, after what was started for this path before.

    Args:
        path: What is written, such as a directory.
        write: Returns None, or the reason why nothing was written, of which `wait` warns.
    """
    wait(path)
    _started[os.path.realpath(path)] = _threads.submit(write)


def wait(path: str | os.PathLike[str]) -> None:
    """Wait until what was started for a path has ended; raise what it raised."""
    name = os.path.realpath(path)
    if running := _started.get(name):
        futures.wait([running])  # Ctrl-C may interrupt this, and leaves it to be waited for
        _started.pop(name, None)
        if problem := running.result():
            warnings.warn(problem, stacklevel=3)


@atexit.register
def _wait_for_all() -> None:
    for name in [*_started]:
        wait(name)
