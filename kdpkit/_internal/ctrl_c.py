"""Ctrl-C as one line and exit code 130: importing this is all, so programs import it first.

Python would print a traceback of whatever was being imported. Once a program runs, `kdpkit.cli` and
`kdpkit.experiment.run` catch it themselves.
"""

import os
import sys
from types import TracebackType


def _end_in_one_line(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    name = os.path.basename(sys.argv[0])  # noqa: PTH119 pathlib is not loaded yet
    program = "kdpkit" if name in ("-m", "__main__.py") else name
    sys.stderr.write(f"{program}: Stopped by Ctrl-C.\n")
    raise SystemExit(130)


if sys.excepthook is sys.__excepthook__:  # no other program's, as a notebook's
    sys.excepthook = _end_in_one_line
