"""What TensorFlow's libraries write while they are imported, and no setting of theirs hides.

TensorFlow 2.20 and later write how they were built, and that there is no GPU, whatever
TF_CPP_MIN_LOG_LEVEL says (tensorflow/tensorflow#100442).
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_HIDDEN = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} [\d:.]+ ")


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hold back what the block writes to stderr, and then write it without such lines.

    Where it is not set, TF_CPP_MIN_LOG_LEVEL is set: it hides what TensorFlow writes of the kind
    once it is loaded. Nothing is held back if it is 0, if there is no stderr, or no room for it.
    """
    level = "2" if Path("/proc/driver/nvidia").exists() else "3"  # 2 shows errors, as of CUDA
    is_shown = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level) == "0" or sys.stderr is None
    held = None if is_shown else _temporary_file()
    if held is None:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not _HIDDEN.match(line)))


def _temporary_file() -> IO[bytes] | None:
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return None
