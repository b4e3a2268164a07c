"""Environment variables that choose threads and devices.

Only what is known to be harmless is shown of their values: numbers and the usual words. The rest
may be a path or a secret.
"""

import re
from collections.abc import Iterator, Mapping

from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics import _machine

_NAMES = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "TF_GPU_THREAD_MODE",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "PJRT_NPROC",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
_VALUE = r"(-?\d+(\.\d+)?|true|false|on|off|cpu|gpu|cuda|rocm|tpu|gpu_private|gpu_shared|global)"
_HARMLESS = re.compile(rf"(--(xla|tf)_\w+=)?{_VALUE}(,{_VALUE})*", re.IGNORECASE)
_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d{1,9})")
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set, with as much of their values as may be shown.

    >>> shown({"OMP_NUM_THREADS": "2", "XLA_FLAGS": "--xla_dump_to=/home/ann", "HOME": "/home/ann"})
    {'XLA_FLAGS': '(not shown)', 'OMP_NUM_THREADS': '2'}
    """
    return {name: _value(environ[name]) for name in _NAMES if name in environ}


def _value(value: str) -> str:
    words = [word if _HARMLESS.fullmatch(word) else "(not shown)" for word in value.split()]
    return " ".join(words) or "empty"


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether the variables hide all GPUs from programs."""
    return environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def findings(environ: Mapping[str, str], machine: _machine.Machine) -> Iterator[Finding]:
    """Find settings with which training hangs, or is slow for no reason."""
    yield from _logical_devices(environ, machine)
    yield from _threads(environ, machine)
    if machine.gpus and hides_gpus(environ):
        yield Finding(
            "hidden-gpus",
            "note",
            "CUDA_VISIBLE_DEVICES",
            f"It hides {len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}.",
            "Leave it out to train on them.",
        )


def _logical_devices(environ: Mapping[str, str], machine: _machine.Machine) -> Iterator[Finding]:
    wanted = _CPU_DEVICES.findall(environ.get("XLA_FLAGS", ""))
    devices = int(wanted[-1]) if wanted else 1
    threads = _integer(environ, "PJRT_NPROC") or machine.cores
    if devices > 1 and threads < 2 * devices:
        yield Finding(
            "device-threads",
            "error",
            "XLA_FLAGS",
            f"JAX has {devices} CPU devices and {threads} threads for them: with fewer than two "
            "for each, training can hang.",
            f"Set PJRT_NPROC={2 * devices}, or call `kdpkit.testing.use_logical_cpus`.",
        )


def _threads(environ: Mapping[str, str], machine: _machine.Machine) -> Iterator[Finding]:
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        threads = _integer(environ, name)
        if threads > machine.cores:
            yield Finding(
                "many-threads",
                "slow",
                name,
                f"{threads} threads share the {machine.cores} cores that this process may use.",
                f"Leave {name} out, or set it to {machine.cores}.",
            )
    limit = machine.cores_limit
    is_chosen = all(_integer(environ, name) for name in _TENSORFLOW_THREADS)
    if limit is not None and machine.cores >= 2 * limit and not is_chosen:
        settings = ", ".join(f"{name}={max(1, round(limit))}" for name in _TENSORFLOW_THREADS)
        yield Finding(
            "container-share",
            "slow",
            "threads",
            f"The container may use the time of {limit:g} cores, and TensorFlow and JAX start a "
            f"thread for each of the {machine.cores} that they see: all wait when the time is "
            "used up.",
            f"Set {settings}, or assign cores to the container (a cpuset).",
        )


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if re.fullmatch(r"\d{1,9}", value) else 0
