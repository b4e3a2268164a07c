"""The machine that this process sees: processor, memory, GPUs and TPU chips."""

import dataclasses
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from kdpkit import _cpu_threads, _tpu
from kdpkit.diagnostics import _cgroups

_GIB = 2**30
_CPU_FILE = Path("/proc/cpuinfo")
_NVIDIA_FILES = Path("/proc/driver/nvidia")
_MAC_QUERY = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML tells of it; None where it does not tell."""

    name: str
    memory_gib: float | None
    compute_capability: str | None


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        cpu: The processor's name.
        cores: Logical cores on which this process may run.
        cores_present: All of the machine.
        cores_limit: Cores whose time its container may use; None without a limit.
        memory_gib: Of the machine, or less where a container has less.
        gpus: NVIDIA's, whether or not CUDA_VISIBLE_DEVICES shows them to programs.
        gpu_driver: The version of their driver.
        cuda_of_driver: The newest CUDA that the driver runs, such as `"12.8"`.
        gpus_unread: Why nothing can be told of GPUs, if there are some.
        tpu_chips: On the machine's bus.
    """

    cpu: str
    cores: int
    cores_present: int
    cores_limit: float | None
    memory_gib: float | None
    gpus: tuple[Gpu, ...]
    gpu_driver: str | None
    cuda_of_driver: str | None
    gpus_unread: str | None
    tpu_chips: int


def look() -> Machine:
    """Look at the machine, without a framework."""
    memory = memory_bytes()
    return Machine(
        cpu=_cpu(),
        cores=_cpu_threads.cores(),
        cores_present=os.cpu_count() or 1,
        cores_limit=_cgroups.limits().cores,
        memory_gib=round(memory / _GIB, 1) if memory else None,
        tpu_chips=_tpu.chips(),
        **_of_nvml(),
    )


def _cpu() -> str:
    if _CPU_FILE.exists():
        lines = _CPU_FILE.read_text(errors="replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        if name := next(names, ""):
            return name
    if platform.system() == "Darwin":
        asked = subprocess.run(_MAC_QUERY, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 a fixed command
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Give the memory that this process may use at most; None where that is not known."""
    limits = [size for size in (_physical_bytes(), _cgroups.limits().memory_bytes) if size]
    return min(limits, default=None)


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return None


def _of_nvml() -> dict[str, Any]:
    nothing = {"gpus": (), "gpu_driver": None, "cuda_of_driver": None, "gpus_unread": None}
    try:
        import pynvml as nvml
    except ImportError:
        return nothing | {"gpus_unread": _unread("the package `nvidia-ml-py` is not installed")}
    try:
        nvml.nvmlInit()
        try:
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            return nothing | {
                "gpus": tuple(_gpu(nvml, handle) for handle in handles),
                "gpu_driver": nvml.nvmlSystemGetDriverVersion(),
                "cuda_of_driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
            }
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return nothing | {"gpus_unread": _unread(f"NVML says: {error}")}


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def told(query: Any) -> Any:
        try:
            return query(handle)
        except nvml.NVMLError:  # parts of a GPU, and old ones, do not tell everything
            return None

    memory, capability = map(
        told, (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetCudaComputeCapability)
    )
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=round(memory.total / _GIB, 1) if memory else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
    )


def _unread(reason: str) -> str | None:
    """Give the reason where there is a driver, and so may be a GPU."""
    return reason if _NVIDIA_FILES.exists() else None
