"""Readings of this process' devices: NVIDIA GPUs, CPU, and memory."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from kdpkit._internal import cpu_threads
from kdpkit.callbacks._sampling import Source

if TYPE_CHECKING:
    import jax

_GIB = 2**30


def sources() -> tuple[list[Source], list[str]]:
    """Return the available sources, and a message for each one that is not available."""
    found: list[Source] = [Allocations()]
    missing: list[str] = []
    makers: list[tuple[Callable[[], Source], str, str]] = [(Host, "Processor and memory", "psutil")]
    if gpus := _cuda_gpus():
        makers.insert(0, (functools.partial(Gpus, gpus), "The GPUs", "nvidia-ml-py"))
    for make, what, package in makers:
        try:
            found.append(make())
        except ImportError as error:
            missing.append(
                f"{what} cannot be read, because the package `{package}` cannot be imported "
                f"({error}). Install it with `pip install {package}`; training continues without."
            )
        except Exception as error:  # NVML's own, which is only imported if there are GPUs
            reason = f"{type(error).__name__}: {error}"
            missing.append(f"{what} cannot be read ({reason}). Training continues without.")
    return found, missing


class Host:
    """Reads CPU time and memory of this process and of the machine."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        self._cores = cpu_threads.cores()

    def __call__(self) -> dict[str, float]:
        """Read; times are since the last call."""
        memory = self._psutil.virtual_memory()
        return {
            "cpu_utilization": self._process.cpu_percent(None) / self._cores,
            "memory_gib": self._process.memory_info().rss / _GIB,
            "machine_cpu_utilization": self._psutil.cpu_percent(None),
            "machine_memory_gib": (memory.total - memory.available) / _GIB,
        }

    def __str__(self) -> str:
        return "The operating system"


class Gpus:
    """Reads NVIDIA GPUs through NVML, which reports the use by all processes.

    Args:
        gpus: Numbers of the GPUs, as CUDA shows them to this process.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        shown = visible_gpus(
            os.environ.get("CUDA_VISIBLE_DEVICES"), [*map(pynvml.nvmlDeviceGetUUID, handles)]
        )
        self._readers = [
            (f"gpu_{gpu}_{name}", read, handles[shown[gpu]])
            for gpu in gpus
            if gpu < len(shown)
            for name, read in self._kinds()
            if self._can(read, handles[shown[gpu]])
        ]
        if not self._readers:
            raise LookupError("CUDA_VISIBLE_DEVICES names none of the GPUs that NVML shows")

    def __call__(self) -> dict[str, float]:
        """Read all GPUs; utilization is NVML's mean over the last second or less."""
        return {name: read(handle) for name, read, handle in self._readers}

    def __str__(self) -> str:
        return "NVML"

    def _kinds(self) -> Iterator[tuple[str, Callable[[Any], float]]]:
        nvml = self._nvml
        yield "utilization", lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        yield "memory_gib", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB
        yield (
            "temperature_celsius",
            lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        )
        yield "power_watts", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000

    def _can(self, read: Callable[[Any], float], handle: Any) -> bool:
        """Return whether a GPU supports this reading; some GPUs and MIG instances do not."""
        try:
            read(handle)
        except self._nvml.NVMLError_NotSupported:
            return False
        return True


def visible_gpus(setting: str | None, identifiers: Sequence[str]) -> list[int]:
    """Return the NVML indices of the GPUs visible to a process, in CUDA's order.

    Like CUDA, it accepts numbers or prefixes of identifiers, up to the first invalid one. NVML
    orders GPUs by PCI bus, CUDA by speed: on a machine with different GPUs the numbers only agree
    with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.

    Args:
        setting: The variable `CUDA_VISIBLE_DEVICES`; None if it is not set.
        identifiers: Identifiers of all GPUs, in NVML's order.

    >>> visible_gpus("2,GPU-a", ["GPU-a1", "GPU-b2", "GPU-c3"])
    [2, 0]
    >>> visible_gpus("1,-1,0", ["GPU-a1", "GPU-b2"])
    [1]
    """
    if setting is None:
        return [*range(len(identifiers))]
    shown: list[int] = []
    for name in map(str.strip, setting.split(",")):
        matching = [
            i
            for i, identifier in enumerate(identifiers)
            if name == str(i) or (name.startswith("GPU-") and identifier.startswith(name))
        ]
        if len(matching) != 1:
            break
        shown += matching
    return shown


def _cuda_gpus() -> list[int]:
    """Return the CUDA numbers of the GPUs that the backend trains on."""
    if keras.backend.backend() == "jax":
        return sorted(_number(gpu) for gpu in _jax_devices() if gpu.platform == "gpu")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.get_visible_devices("GPU")
        return [int(gpu.name.rpartition(":")[2]) for gpu in gpus]  # "/physical_device:GPU:0"
    return []


class Allocations:
    """Reads how much memory the backend has allocated on each device, if it reports that.

    NVML reports the memory that a backend has reserved, nearly all of the GPU from the start; this
    is the part that arrays and programs used. CPUs do not report it.
    """

    def __init__(self) -> None:
        readers = {"jax": _peaks_on_jax, "tensorflow": _peaks_on_tensorflow}
        self._readers = dict(readers.get(keras.backend.backend(), dict)())

    def __call__(self) -> dict[str, float]:
        """Read the peak since the last call; on JAX since the process started."""
        return {f"{name}_peak_memory_gib": read() / _GIB for name, read in self._readers.items()}

    def __str__(self) -> str:
        return f"The memory of Keras' backend {keras.backend.backend()}"


def _peaks_on_jax() -> Iterator[tuple[str, Callable[[], float]]]:
    def peak(device: "jax.Device") -> float:
        return device.memory_stats()["peak_bytes_in_use"]

    for device in _jax_devices():
        if "peak_bytes_in_use" in (device.memory_stats() or {}):
            yield f"{device.platform}_{_number(device)}", functools.partial(peak, device)


def _peaks_on_tensorflow() -> Iterator[tuple[str, Callable[[], float]]]:
    import tensorflow as tf

    memory = tf.config.experimental

    def peak(name: str) -> float:
        highest = memory.get_memory_info(name)["peak"]
        memory.reset_memory_stats(name)
        return highest

    for i in range(_logical_gpus()):
        with contextlib.suppress(ValueError):  # an allocator without statistics
            peak(f"GPU:{i}")
            yield f"gpu_{i}", functools.partial(peak, f"GPU:{i}")


def _logical_gpus() -> int:
    """Count the GPUs of this process; `list_logical_devices` has those of the cluster."""
    import tensorflow as tf

    parts = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
    return sum(len(of_one or [None]) for of_one in parts)


def _jax_devices() -> "list[jax.Device]":
    import jax

    return jax.local_devices()


def _number(device: "jax.Device") -> int:
    number = device.local_hardware_id
    return device.id if number is None else number
