"""Utilization and memory of the devices during training, and a report of idle GPUs."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import os
import re
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from kdpkit._internal import checks, machine, processes

_GIB = 2**30
_BUSY = 50  # percent; below it a GPU is idle most of the time
_SECONDS_TO_END = 5.0  # in which a driver may answer before training ends without the thread
_ENOUGH = 10  # readings in an epoch, at least, before a report


class DeviceMonitor(keras.callbacks.Callback):
    """Logs the utilization and memory of the devices in each epoch.

    A thread reads them every `interval_seconds` while training steps run. Validation is excluded,
    and so is the first execution of a `fit`, which compiles the step (unless the epoch has no
    other). The logs of each epoch get, as far as the machine reports them:

    | name | meaning | unit |
    | --- | --- | --- |
    | `gpu_0_utilization` | time in which the GPU was computing, mean | % |
    | `gpu_0_memory_gib` | GPU memory used by all programs, peak | GiB |
    | `process_cpu_utilization` | this process' use of the cores available to it, mean | % |
    | `process_memory_gib` | memory of this process, peak | GiB |

    The GPUs are those that the backend trains on, with the numbers that CUDA shows it.

    If a GPU is busy less than half as long as another, or no GPU is busy half of the time, they are
    waiting, most often for data; a sentence on stderr reports that once per training. Each of
    several processes reports its own devices; the logs have the first one's readings. What cannot
    be read is reported too, and does not stop training.

    Args:
        interval_seconds: Seconds between readings.

    Raises:
        ValueError: `interval_seconds` is not positive.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> history = model.fit(x, x, batch_size=4, verbose=0, callbacks=DeviceMonitor())
    >>> {"process_cpu_utilization", "process_memory_gib"} <= history.history.keys()
    True
    """

    async_safe = True  # On JAX nothing here makes Keras wait for a step.

    def __init__(self, interval_seconds: float = 1.0) -> None:
        super().__init__()
        self.interval_seconds = checks.number("interval_seconds", interval_seconds, above=0)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the next three, which the thread uses too
        self._sources: dict[str, Iterator[dict[str, float]]] = {}
        self._readings: list[dict[str, float]] = []
        self._is_paused = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.on_train_end()  # An earlier training may have failed.
        self._executions, self._has_reported = 0, False
        self._sources, self._is_paused = _sources(), True
        self._has_ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[self._has_ended], name="kdpkit devices", daemon=True
        )
        self._thread.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._restart()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Discard the first execution, which compiled the step."""
        self._executions += 1
        if self._executions == 2:
            self._restart()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._pause()
        values = {
            name: max(series) if name.endswith("memory_gib") else statistics.fmean(series)
            for name in dict.fromkeys(name for reading in self._readings for name in reading)
            if (series := [reading[name] for reading in self._readings if name in reading])
        }
        if logs is not None and processes.index() == 0:
            logs |= values
        problem = starving(values)
        is_certain = len(self._readings) >= _ENOUGH and self._executions > 1
        if problem and is_certain and not self._has_reported:
            self._has_reported = True
            processes.report(f"Epoch {epoch + 1}: {problem}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._thread:
            self._has_ended.set()
            self._thread.join(_SECONDS_TO_END)

    def _run(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(self.interval_seconds):
            self._sample()

    def _restart(self) -> None:
        with self._lock:
            self._read()  # Some sources report a mean since their last reading.
            self._readings, self._is_paused = [], False

    def _pause(self) -> None:
        """Read a last time, and no more until `_restart`."""
        self._sample()
        self._is_paused = True

    def _sample(self) -> None:
        with self._lock:
            if not self._is_paused:
                self._readings.append(self._read())

    def _read(self) -> dict[str, float]:
        """Read all sources; one that fails is reported, and not read again."""
        values: dict[str, float] = {}
        for package, source in [*self._sources.items()]:
            try:
                values |= next(source)
            except Exception as error:  # the package is missing, or any error of a driver
                del self._sources[package]
                fix = f" `pip install {package}` installs it." * isinstance(error, ImportError)
                processes.report(
                    f"`{package}` failed ({type(error).__name__}: {error}). Training continues "
                    f"without its readings.{fix}"
                )
        return values


def starving(values: Mapping[str, float]) -> str:
    """Return a sentence about GPUs that wait for their input or for another GPU; else "".

    A GPU that waits in a collective is reported as busy, because it runs NCCL's kernel. So the one
    that is not busy is the one that all others wait for.

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
    return bool(re.match(r"gpu_\d+_|process_(cpu_utilization|memory_gib)$", name))


def _sources() -> dict[str, Iterator[dict[str, float]]]:
    """Return what reads the machine's devices, by the package that it needs."""
    gpus = _gpus_of_backend()
    return {"psutil": _host()} | ({"nvidia-ml-py": _nvml(gpus)} if gpus else {})


def _host() -> Iterator[dict[str, float]]:
    import psutil

    process, cores = psutil.Process(), machine.cores()
    while True:
        yield {
            "process_cpu_utilization": process.cpu_percent(None) / cores,  # since the last call
            "process_memory_gib": process.memory_info().rss / _GIB,
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
        by_id, by_index = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByIndex
        handles[gpu] = by_index(int(name)) if name.isdecimal() else by_id(name)
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
