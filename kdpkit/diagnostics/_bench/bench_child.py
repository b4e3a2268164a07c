"""A training of one size, timed, in a process of its own: what `kdpkit bench` starts.

python -m kdpkit.diagnostics._bench.bench_child '{"workload": "cnn", "replicas": 1, ...}'
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from kdpkit.diagnostics import _child_program


def _measured() -> dict[str, Any]:
    with contextlib.suppress(OSError):  # where memory runs out, Linux ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    from kdpkit.diagnostics._bench import timed_training  # loads Keras, whose errors are reported

    return timed_training.measured(**json.loads(sys.argv[1]))


if __name__ == "__main__":
    if exit_code := _child_program.report(_measured):
        os._exit(exit_code)  # without waiting for other processes, which would not end
