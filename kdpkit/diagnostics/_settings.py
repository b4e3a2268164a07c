"""Variables of the environment that decide how many threads compute, and on which devices.

Only what is known to be harmless is shown of a value: numbers, and words of the ones that are
expected. The rest may be a path or a secret, and is told to be set.
"""

import re
from collections.abc import Iterator, Mapping

from kdpkit import _findings
from kdpkit.diagnostics import _machine

_NUMBER = r"-?\d+(\.\d+)?"
_NUMBERS = rf"{_NUMBER}(,{_NUMBER})*"
_SWITCH = "0|1|true|false|on|off"
_PLATFORMS = "cpu|gpu|cuda|rocm|tpu"
_THREAD_MODES = ("global", "gpu_private", "gpu_shared")

# What may be shown of each. `KERAS_BACKEND` is told by itself.
_SHOWN = {
    "TF_NUM_INTRAOP_THREADS": _NUMBER,
    "TF_NUM_INTEROP_THREADS": _NUMBER,
    "TF_GPU_THREAD_MODE": "|".join(_THREAD_MODES),
    "TF_GPU_THREAD_COUNT": _NUMBER,
    "TF_ENABLE_ONEDNN_OPTS": _SWITCH,
    "TF_FORCE_GPU_ALLOW_GROWTH": _SWITCH,
    "TF_XLA_FLAGS": "",
    "XLA_FLAGS": "",
    "XLA_PYTHON_CLIENT_PREALLOCATE": _SWITCH,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _NUMBER,
    "JAX_PLATFORMS": rf"({_PLATFORMS})(,({_PLATFORMS}))*",
    "JAX_ENABLE_X64": _SWITCH,
    "PJRT_NPROC": _NUMBER,
    "OMP_NUM_THREADS": _NUMBERS,
    "MKL_NUM_THREADS": _NUMBER,
    "OPENBLAS_NUM_THREADS": _NUMBER,
    "CUDA_VISIBLE_DEVICES": _NUMBERS,
}
_FLAGS = ("TF_XLA_FLAGS", "XLA_FLAGS")
_FLAG = re.compile(
    rf"(?P<name>--(?:xla|tf)_\w+)(?:=(?P<value>{_NUMBER}|{_SWITCH}))?", re.IGNORECASE
)
_FLAG_NAME = re.compile(r"--(?:xla|tf)_\w+(?==)", re.IGNORECASE)
_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that are set, with as much of their values as may be shown.

    >>> shown({"OMP_NUM_THREADS": "2", "XLA_FLAGS": "--xla_dump_to=/home/ann", "HOME": "/home/ann"})
    {'XLA_FLAGS': '--xla_dump_to=(not shown)', 'OMP_NUM_THREADS': '2'}
    """
    return {name: _value(name, environ[name]) for name in _SHOWN if name in environ}


def findings(environ: Mapping[str, str], machine: _machine.Machine) -> Iterator[_findings.Finding]:
    """Give the settings that fight each other, or the machine.

    Args:
        environ: The variables.
        machine: What they are set for.
    """
    numbers = {name: _integer(environ.get(name)) for name in _SHOWN}
    yield from _too_many(numbers, machine)
    yield from _too_few(numbers, machine)
    yield from _container(numbers, machine)
    yield from _logical_devices(environ, numbers, machine)
    yield from _gpu_threads(environ, machine)
    yield from _hidden_gpus(environ, machine)


def _value(name: str, value: str) -> str:
    if name in _FLAGS:
        return " ".join(map(_flag, value.split())) or "empty"
    if not value:
        return "empty"
    return value if re.fullmatch(_SHOWN[name], value, re.IGNORECASE) else "set (not shown)"


def _flag(word: str) -> str:
    if _FLAG.fullmatch(word):
        return word
    name = _FLAG_NAME.match(word)
    return f"{name[0]}=(not shown)" if name else "(not shown)"


def _integer(value: str | None) -> int | None:
    return int(value) if value and re.fullmatch(r"\d{1,9}", value) else None


def _too_many(
    numbers: Mapping[str, int | None], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    for name in ("TF_NUM_INTRAOP_THREADS", *_LIBRARY_THREADS):
        threads = numbers[name]
        if threads and threads > machine.cores:
            yield _findings.Finding(
                "many-threads",
                "slow",
                name,
                f"{threads} threads share the {_cores(machine.cores)} that this process may use.",
                f"Leave {name} out, or set it to {machine.cores}.",
            )


def _too_few(
    numbers: Mapping[str, int | None], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    if machine.cores == 1:
        return
    if numbers["TF_NUM_INTRAOP_THREADS"] == 1:
        yield _findings.Finding(
            "one-thread",
            "slow",
            "TF_NUM_INTRAOP_THREADS",
            f"Each operation of TensorFlow uses one of {_cores(machine.cores)}.",
            "Leave TF_NUM_INTRAOP_THREADS out.",
        )
    ones = [name for name in _LIBRARY_THREADS if numbers[name] == 1]
    if ones:
        yield _findings.Finding(
            "one-thread",
            "note",
            ", ".join(ones),
            f"NumPy, and libraries with OpenMP, use one of {_cores(machine.cores)}; TensorFlow "
            "and JAX do not look at it.",
            "Leave it out where data are prepared with NumPy, or scikit-learn is used.",
        )


def _container(
    numbers: Mapping[str, int | None], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    if machine.cores_limit is None or machine.cores < 2 * machine.cores_limit:
        return
    if all(numbers[name] for name in _TENSORFLOW_THREADS):
        return
    threads = max(1, round(machine.cores_limit))
    settings = ", ".join(f"{name}={threads}" for name in _TENSORFLOW_THREADS)
    yield _findings.Finding(
        "container-share",
        "slow",
        "threads",
        f"The container may use the time of {machine.cores_limit:g} cores, and TensorFlow and JAX "
        f"start a thread for each of the {machine.cores} that they see: all stop when the time is "
        "used up.",
        f"Set {settings}, or give the container cores of its own (a cpuset).",
    )


def _logical_devices(
    environ: Mapping[str, str], numbers: Mapping[str, int | None], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    wanted = _CPU_DEVICES.findall(environ.get("XLA_FLAGS", ""))
    devices = int(wanted[-1][:9]) if wanted else 1
    threads = numbers["PJRT_NPROC"] or machine.cores
    if devices > 1 and threads < 2 * devices:
        yield _findings.Finding(
            "device-threads",
            "refused",
            "XLA_FLAGS",
            f"JAX has {devices} CPU devices and {threads} threads for them: with fewer than two "
            "for each, training can stop for ever.",
            f"Set PJRT_NPROC={2 * devices}, or call `kdpkit.testing.use_logical_cpus`.",
        )


def _gpu_threads(
    environ: Mapping[str, str], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    mode = environ.get("TF_GPU_THREAD_MODE", "")
    if mode and mode.lower() not in _THREAD_MODES:
        yield _findings.Finding(
            "thread-mode",
            "refused",
            "TF_GPU_THREAD_MODE",
            "TensorFlow knows no such mode, and starts no GPU with it.",
            f"Set it to one of {', '.join(_THREAD_MODES)}, or leave it out.",
        )
    if environ.get("TF_GPU_THREAD_COUNT") and mode.lower() not in _THREAD_MODES[1:]:
        yield _findings.Finding(
            "thread-mode",
            "note",
            "TF_GPU_THREAD_COUNT",
            "It counts with TF_GPU_THREAD_MODE=gpu_private or gpu_shared alone.",
            "Set TF_GPU_THREAD_MODE too, or leave both out.",
        )
    if mode and not machine.gpus and not machine.gpus_unread:
        yield _findings.Finding(
            "thread-mode",
            "note",
            "TF_GPU_THREAD_MODE",
            "It is about GPUs, and there is none.",
            "Leave it out.",
        )


def _hidden_gpus(
    environ: Mapping[str, str], machine: _machine.Machine
) -> Iterator[_findings.Finding]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if machine.gpus and visible is not None and visible.strip() in ("", "-1"):
        yield _findings.Finding(
            "hidden-gpus",
            "note",
            "CUDA_VISIBLE_DEVICES",
            f"It hides {len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}.",
            "Leave it out to train on them.",
        )


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
