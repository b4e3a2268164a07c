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

_HIDDEN = re.compile(rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} [\d:.]+ ")


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hold back what the block writes to stderr, and then write it without such lines.

    Where it is not set, TF_CPP_MIN_LOG_LEVEL is set: it hides what TensorFlow writes of the kind
    once it is loaded. Nothing is held back if it is 0, or if there is no stderr.
    """
    level = "2" if Path("/proc/driver/nvidia").exists() else "3"  # 2 shows errors, as of CUDA
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level) == "0" or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not _HIDDEN.match(line)))
