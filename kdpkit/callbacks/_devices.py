"""Utilization and memory of the devices during training, and a warning for idle GPUs."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import os
import re
import statistics
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from kdpkit._internal import checks, machine, processes

_GIB = 2**30
_BUSY = 50  # percent; below it a GPU is idle most of the time
_PATIENCE = 5.0  # seconds to wait for the thread to end
_ENOUGH = 10  # readings in an epoch, at least, before a warning


class DeviceMonitor(keras.callbacks.Callback):
    """Logs the utilization and memory of the devices in each epoch.

    A thread reads them every `interval_seconds` while training steps run. Validation is excluded,
    and so is the first execution of a `fit`, which compiles the step (unless the epoch has no
    other). The logs of each epoch get, as far as the machine reports them:

    | name | meaning | unit |
    | --- | --- | --- |
    | `gpu_0_utilization` | time in which the GPU was computing, mean | % |
    | `gpu_0_memory_gib` | GPU memory used by all programs, peak | GiB |
    | `cpu_utilization` | this process' use of the cores available to it, mean | % |
    | `memory_gib` | memory of this process, peak | GiB |

    The GPUs are those that the backend trains on, with the numbers that CUDA shows it.

    If a GPU is busy less than half as long as another, or no GPU is busy half of the time, they are
    waiting, most often for data; a warning reports that once per training. Each of several
    processes warns about its own devices; the logs have the first one's readings. What cannot be
    read does not stop training: a warning reports it.

    Args:
        interval_seconds: Seconds between readings.

    Raises:
        ValueError: `interval_seconds` is not positive.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> history = model.fit(x, x, batch_size=4, verbose=0, callbacks=DeviceMonitor())
    >>> {"cpu_utilization", "memory_gib"} <= history.history.keys()
    True
    """

    async_safe = True  # on JAX nothing here makes Keras wait for a step

    def __init__(self, interval_seconds: float = 1.0) -> None:
        super().__init__()
        self.interval_seconds = checks.number("interval_seconds", interval_seconds, above=0)
        self._sampler = _Sampler({}, interval_seconds)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._sampler.end()  # of an earlier training that failed
        self._executions, self._has_warned = 0, False
        self._sampler = _Sampler(_sources(), self.interval_seconds)
        self._sampler.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._sampler.count()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Discard the first execution, which compiled the step."""
        self._executions += 1
        if self._executions == 2:
            self._sampler.count()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._sampler.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._sampler.pause()
        values = self._sampler.values()
        if logs is not None and processes.index() == 0:
            logs |= values
        problem = starving(values)
        is_certain = len(self._sampler.readings) >= _ENOUGH and self._executions > 1
        if problem and is_certain and not self._has_warned:
            self._has_warned = True
            _warn(f"Epoch {epoch + 1}: {problem}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._sampler.end()


def starving(values: Mapping[str, float]) -> str:
    """Return a sentence about GPUs that wait for their input or for another GPU; else "".

    With collectives a GPU that waits for others is reported as busy, because it runs NCCL's
    kernels. So the one that is not busy is the one that all others wait for.

    >>> starving({"gpu_0_utilization": 96.0, "gpu_1_utilization": 80.0})
    ''
    """
    busy = {name: value for name, value in values.items() if re.match(r"gpu_\d+_util", name)}
    least, most = min(busy.values(), default=_BUSY), max(busy.values(), default=_BUSY)
    if most >= _BUSY and least >= most / 2:
        return ""
    each = ", ".join(f"{name} {value:.0f} %" for name, value in busy.items())
    return (
        f"a GPU waits, most often for its data ({each}). "
        "`kdpkit doctor --measure train.py` reports how long a step waits, and the slowest stage."
    )


def is_reading(name: str) -> bool:
    return bool(re.match(r"gpu_\d+_|cpu_utilization$|memory_gib$", name))


def _warn(sentence: str) -> None:
    here = f"Process {processes.index()}: " if processes.count() > 1 else ""
    warnings.warn(here + sentence, stacklevel=3)


class _Sampler(threading.Thread):
    """Reads sources until `end` or the end of the program; one that raises is not read again."""

    def __init__(
        self, sources: Mapping[str, Iterator[Mapping[str, float]]], interval_seconds: float
    ) -> None:
        super().__init__(name="kdpkit devices", daemon=True)
        self.readings: list[dict[str, float]] = []
        self._sources = dict(sources)
        self._interval = interval_seconds
        self._counts = False
        self._lock = threading.Lock()  # guards all of the above
        self._has_ended = threading.Event()

    def count(self) -> None:
        """Count from now on, and discard earlier readings."""
        with self._lock:
            self._read()  # sources that report the time since the last reading start here
            self.readings, self._counts = [], True

    def pause(self) -> None:
        """Count up to now, then stop."""
        self._add()
        self._counts = False

    def values(self) -> dict[str, float]:
        """Return the mean of each reading, or the peak of memory."""
        names = {name: None for reading in self.readings for name in reading}
        found = {name: [r[name] for r in self.readings if name in r] for name in names}
        return {
            name: max(values) if name.endswith("memory_gib") else statistics.fmean(values)
            for name, values in found.items()
        }

    def end(self) -> None:
        self._has_ended.set()
        if self.is_alive():
            self.join(_PATIENCE)

    def run(self) -> None:
        while not self._has_ended.wait(self._interval):
            self._add()

    def _add(self) -> None:
        with self._lock:
            if self._counts:
                self.readings.append(self._read())

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for package, readings in [*self._sources.items()]:
            try:
                values |= next(readings)
            except Exception as error:  # it is not installed, or any error of a driver
                del self._sources[package]
                fix = f" `pip install {package}` installs it." * isinstance(error, ImportError)
                _warn(
                    f"`{package}` failed ({type(error).__name__}: {error}). Training continues "
                    f"without its readings.{fix}"
                )
        return values


# What the machine reports, by the package that reads it.


def _sources() -> dict[str, Iterator[dict[str, float]]]:
    gpus = _gpus_of_backend()
    return {"psutil": _host()} | ({"nvidia-ml-py": _nvml(gpus)} if gpus else {})


def _host() -> Iterator[dict[str, float]]:
    import psutil

    process, cores = psutil.Process(), machine.cores()
    while True:
        yield {
            "cpu_utilization": process.cpu_percent(None) / cores,  # since the last call
            "memory_gib": process.memory_info().rss / _GIB,
        }


def _nvml(gpus: Iterable[int]) -> Iterator[dict[str, float]]:
    """Read GPUs, by the numbers that CUDA shows to this process."""
    import pynvml as nvml

    nvml.nvmlInit()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = {} if shown is None else dict(enumerate(map(str.strip, shown.split(","))))
    handles = {}
    for gpu in gpus:
        name = names.get(gpu, str(gpu))
        find, by_index = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByIndex
        handles[gpu] = by_index(int(name)) if name.isdecimal() else find(name)
    while True:
        values: dict[str, float] = {}
        for gpu, handle in handles.items():
            values[f"gpu_{gpu}_utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            values[f"gpu_{gpu}_memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB
        yield values


def _gpus_of_backend() -> list[int]:
    """Return the CUDA numbers of the GPUs that the backend trains on."""
    if keras.backend.backend() == "jax":
        import jax

        return [d.local_hardware_id for d in jax.local_devices() if d.platform == "gpu"]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.get_visible_devices("GPU")
        return [int(gpu.name.rpartition(":")[2]) for gpu in gpus]  # "/physical_device:GPU:0"
    return []
