"""The device that the run is on, as the first process found it, and what JAX reports of its memory.

The other processes read it from their environment: a TPU serves one process at a time, and whoever
only compares figures must not start JAX.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

_VARIABLE = "KDPKIT_ACCELERATOR"
# Dense bfloat16 products, in FLOP/s, from the makers' data sheets.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}
_LOOK = """
import json, jax
device = jax.devices()[0]
limit = (device.memory_stats() or {}).get("bytes_limit", 0)
print(json.dumps([device.platform, device.device_kind, limit / 2**30, jax.device_count()]))
"""


class Device(NamedTuple):
    """What JAX computes on.

    Args:
        platform: `"gpu"`, `"tpu"` or `"cpu"`.
        kind: What it calls itself.
        gib: Memory that JAX may use, 0 where it does not report that.
        count: How many there are.
    """

    platform: str
    kind: str
    gib: float
    count: int

    @property
    def peak_flops(self) -> float | None:
        """Its bfloat16 peak in FLOP/s; None if it is not in the table."""
        return next((peak for part, peak in _PEAKS.items() if part in self.kind), None)


def look() -> Device:
    """Look at the device in a process of its own, and hand it to all that are started later."""
    everything = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    command = [sys.executable, "-c", _LOOK]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=everything)
    os.environ[_VARIABLE] = printed.stdout.splitlines()[-1]
    return current()


def current() -> Device:
    """Return what `look` found."""
    return Device(*json.loads(os.environ[_VARIABLE]))


def peak_bytes() -> int | None:
    """Return the peak of JAX's memory on the device since the process began, if it is reported."""
    return _reported("peak_bytes_in_use")


def bytes_limit() -> int | None:
    """Return the memory that JAX may use in this process, if it is reported."""
    return _reported("bytes_limit")


def _reported(name: str) -> int | None:
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get(name)
