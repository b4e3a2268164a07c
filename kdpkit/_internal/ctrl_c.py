"""Ctrl-C as one line and exit code 130: importing this is all, so programs import it first.

While a program imports, the process ends at once: an exception would end as a traceback, and where
a library catches it or C++ called the import, it is lost or the process crashes. Nothing is to be
saved then. Once a program runs, `kdpkit.cli` and `kdpkit.experiment.run` catch it themselves.
"""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

stderr = 2  # the file descriptor; another one while that is held back


def _end(number: int, frame: FrameType | None) -> None:
    """Leave if something is imported, and raise `KeyboardInterrupt` otherwise."""
    inner = frame
    while inner is not None and inner.f_code.co_name != "_find_and_load":
        inner = inner.f_back
    if inner is None:
        signal.default_int_handler(number, frame)
    os.write(stderr, _line())
    os._exit(128 + number)


def _end_in_one_line(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    os.write(stderr, _line())
    raise SystemExit(130)


def _line() -> bytes:
    name = os.path.basename(sys.argv[0])  # noqa: PTH119 pathlib is not loaded yet
    program = "kdpkit" if name in ("-m", "__main__.py") else name
    return f"{program}: Stopped by Ctrl-C.\n".encode()


if sys.excepthook is sys.__excepthook__:  # no other program's, as a notebook's
    sys.excepthook = _end_in_one_line
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
