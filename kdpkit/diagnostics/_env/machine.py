"""The machine that this process sees: processor, memory, GPUs and TPU chips."""

import contextlib
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from kdpkit._internal import machine

_GIB = 2**30
_CPU_FILE = Path("/proc/cpuinfo")
_GROUP_FILE = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it; None where NVML does not know."""

    name: str
    memory_gib: float | None
    compute_capability: str | None


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware, and what a container may use of it.

    Attributes:
        cpu: The processor's name.
        cores: Logical cores on which this process may run, of `cores_present`.
        cores_limit: Cores whose time its container may use; None without a limit.
        memory_gib: Of the machine, or less where a container has less.
        gpus: NVIDIA's, also those that CUDA_VISIBLE_DEVICES hides; none without `nvidia-ml-py`.
        gpu_driver: The version of their driver.
        cuda_of_driver: The newest CUDA that the driver runs, such as `"12.8"`.
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
    tpu_chips: int


def look() -> Machine:
    """Look at the machine, without a framework."""
    memory = memory_bytes()
    return Machine(
        cpu=_cpu(),
        cores=machine.cores(),
        cores_present=os.cpu_count() or 1,
        cores_limit=cores_limit(),
        memory_gib=round(memory / _GIB, 1) if memory else None,
        tpu_chips=machine.chips(),
        **_of_nvml(),
    )


def _cpu() -> str:
    lines = _CPU_FILE.read_text(errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Return the memory that this process may use; None where that is not known."""
    sizes = [int(words[0]) for words in _group_limits("memory.max")]
    with contextlib.suppress(AttributeError, ValueError):  # Windows has no `sysconf`
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)


def cores_limit() -> float | None:
    """Return the processor time, in cores, that the container of this process may use."""
    limits = (int(quota) / int(period) for quota, period in _group_limits("cpu.max"))
    return min(limits, default=None)


def _group_limits(name: str) -> list[list[str]]:
    """Return the words of a limit in the control group of this process, and in those around it.

    That is version 2 of control groups, on Linux. A container may see its own group as the root.
    """
    line = _GROUP_FILE.read_text().strip() if _GROUP_FILE.exists() else ""
    group = _GROUPS / line.rpartition("::")[2].strip("/")
    files = [each / name for each in (group, *group.parents) if each.is_relative_to(_GROUPS)]
    limits = [file.read_text().split() for file in files if file.exists()]
    return [words for words in limits if words and words[0] != "max"]


def _of_nvml() -> dict[str, Any]:
    nothing = {"gpus": (), "gpu_driver": None, "cuda_of_driver": None}
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # it is not installed, or there is no driver
        return nothing
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return {
            "gpus": tuple(_gpu(nvml, handle) for handle in handles),
            "gpu_driver": nvml.nvmlSystemGetDriverVersion(),
            "cuda_of_driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    except nvml.NVMLError:
        return nothing
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def asked(query: Any) -> Any:
        try:
            return query(handle)
        except nvml.NVMLError:  # parts of a GPU and old ones do not answer everything
            return None

    memory = asked(nvml.nvmlDeviceGetMemoryInfo)
    capability = asked(nvml.nvmlDeviceGetCudaComputeCapability)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=round(memory.total / _GIB, 1) if memory else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
    )
