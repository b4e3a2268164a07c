"""What TensorFlow's libraries write when they are loaded, and no setting of theirs hides.

TensorFlow 2.20 and 2.21 write how they were built, and that there is no GPU, whatever
TF_CPP_MIN_LOG_LEVEL says (tensorflow/tensorflow#100442).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kdpkit._internal import ctrl_c

_HIDDEN = (
    "WARNING: All log messages before absl::InitializeLog",
    "[IW][0-9]{4} [0-9:.]+ ",
    "To enable the following instructions",
)
_WITHOUT_GPU = "E[0-9]{4} .*(cuInit|cuda)"


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Leave lines about how TensorFlow was built out of what this process writes to stderr.

    Errors are shown, those about CUDA where there is an NVIDIA GPU. Another process takes the lines
    out, so nothing is lost if this one crashes. It ends when nobody writes to it any more, so no
    process that lives on may be started here. Nothing is hidden if TF_CPP_MIN_LOG_LEVEL is 0. Where
    it is not set, it is set: it hides what TensorFlow writes of the kind once it is loaded.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if _has_gpu() else "3")
    process = None if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" else _filter()
    if process is None or process.stdin is None:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    outer, ctrl_c.stderr = ctrl_c.stderr, kept if ctrl_c.stderr == 2 else ctrl_c.stderr
    try:
        yield
    finally:
        ctrl_c.stderr = outer
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        process.wait()


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists()


def _filter() -> subprocess.Popen[bytes] | None:
    pattern = "|".join(_HIDDEN if _has_gpu() else (*_HIDDEN, _WITHOUT_GPU))
    command = ["grep", "--line-buffered", "-v", "-E", f"^({pattern})"]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)  # noqa: S603 this file's
    except OSError:  # there is no `grep`, or no terminal
        return None
