"""Utilization and memory of the devices during training, and a warning for idle GPUs."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import functools
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from kdpkit._internal import checks, machine, processes

Source = Callable[[], Mapping[str, float]]

_GIB = 2**30
_PEAKS = ("memory_gib", "temperature_celsius")  # of which the highest counts, not the mean
_BUSY = 50  # percent; below it a GPU is idle most of the time
_PATIENCE = 5.0  # seconds to wait for the thread to end
_ENOUGH = 10  # readings in an epoch, at least, before a warning
_REMEDY = "`kdpkit.pipelines.measure(train)` measures the input pipeline, stage by stage."


class DeviceMonitor(keras.callbacks.Callback):
    """Logs the utilization and memory of the devices in each epoch.

    A thread reads them every `interval_seconds` while training steps run. Validation is excluded,
    and so is the first execution of a `fit`, which compiles the step (unless the epoch has no
    other). The logs of each epoch get, as far as the machine reports them:

    | name | meaning | unit |
    | --- | --- | --- |
    | `gpu_0_utilization` | time in which the GPU was computing, mean | % |
    | `gpu_0_memory_gib` | GPU memory used by all programs, peak | GiB |
    | `gpu_0_peak_memory_gib` | part of it used by this process' arrays and programs, peak | GiB |
    | `gpu_0_temperature_celsius`, `gpu_0_power_watts` | peak; mean | °C; W |
    | `cpu_utilization` | this process' use of the cores available to it, mean | % |
    | `memory_gib` | memory of this process, peak | GiB |
    | `machine_cpu_utilization`, `machine_memory_gib` | the same for all programs, mean; peak | %;
    GiB |

    The GPUs are those that the backend trains on, with the numbers that CUDA shows it. The peak of
    arrays and programs (on TPUs `tpu_0_peak_memory_gib`) is, on JAX, the peak since the program
    started.

    If one GPU is busy less than half as long as another, or no GPU is busy half of the time, they
    are waiting, most often for data; a warning reports that once per training. Each of several
    processes warns about its own devices; the logs have the first one's readings. A source that
    fails does not stop training: a warning reports it, and its readings are NaN from then on.

    Args:
        interval_seconds: Seconds between readings.
        sources: Functions that return a mapping from names to numbers, used instead of all of the
            above. The peak is logged for names that end in `memory_gib` and `temperature_celsius`,
            else the mean over time; a `gpu_3_utilization` can cause the warning above. They are
            called in a thread, and when epochs and validation begin and end.

    Raises:
        ValueError: `interval_seconds` is not positive, or a source cannot be called.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> fans = DeviceMonitor(sources=[lambda: {"fan_utilization": 30.0}])
    >>> history = model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=fans)
    >>> history.history["fan_utilization"]
    [30.0, 30.0]
    """

    # On JAX nothing here makes Keras wait for a step.
    async_safe = True

    def __init__(
        self, interval_seconds: float = 1.0, *, sources: Iterable[Source] | None = None
    ) -> None:
        super().__init__()
        self.interval_seconds = checks.number("interval_seconds", interval_seconds, above=0)
        self.sources = None if sources is None else [*sources]
        for source in self.sources or ():
            if not callable(source):
                checks.fail("`sources` must be functions of no argument.", source=source)
        self._sampler: _Sampler | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the sources, and start the thread."""
        self.on_train_end()  # of an earlier training that failed
        self._names: dict[str, float] = {}  # names logged so far, each with NaN
        self._executions, self._has_warned = 0, False
        sources = [*_sources()] if self.sources is None else self.sources
        self._sampler = _Sampler(sources, self.interval_seconds)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start counting."""
        if self._sampler:
            self._sampler.count(again=True)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Discard the first execution, which compiled the step."""
        if self._sampler:
            self._executions += 1
            if self._executions == 2:
                self._sampler.count(again=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Exclude validation."""
        if self._sampler:
            self._sampler.pause()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Count again."""
        if self._sampler:
            self._sampler.count()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the epoch's readings, and warn about GPUs that wait."""
        if self._sampler is None:
            return
        self._sampler.pause()
        values, failures = self._sampler.values(), self._sampler.failures
        while failures:
            _warn(failures.pop(0))
        # Earlier names stay, so History has a number for every epoch.
        self._names |= dict.fromkeys(values, math.nan)
        if logs is not None and processes.index() == 0:
            logs |= self._names | values
        found = {re.fullmatch(r"gpu_(\d+)_utilization", name): name for name in values}
        problem = starving({int(match[1]): values[name] for match, name in found.items() if match})
        is_certain = self._sampler.readings >= _ENOUGH and self._executions > 1
        if problem and is_certain and not self._has_warned:
            self._has_warned = True
            _warn(f"Epoch {epoch + 1}: {problem}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the thread."""
        if self._sampler:
            self._sampler.end()
        self._sampler = None


def starving(utilizations: Mapping[int, float]) -> str:
    """Describe which GPUs wait, most often for data; empty if none does.

    In synchronous training a GPU that waits for the others' gradients counts as busy, since it runs
    NCCL's kernels. So the one that is not busy is the one that all others wait for.

    Args:
        utilizations: Mean utilization in percent, by GPU number.

    >>> print(starving({0: 96.0, 1: 40.0, 2: 97.0}).partition(":")[0])
    GPU 1 computed for 40 % of the time, and GPU 2 for 97 %
    >>> print(starving({0: 12.0, 1: 10.0}).partition(":")[0])
    the GPUs computed for 12 % of the time at most
    >>> starving({0: 96.0, 1: 80.0}), starving({})
    ('', '')
    """
    if not utilizations:
        return ""
    idlest, busiest = (of(utilizations, key=lambda gpu: utilizations[gpu]) for of in (min, max))
    least, most = utilizations[idlest], utilizations[busiest]
    if most < _BUSY:
        several = len(utilizations) > 1
        return (
            f"the GPU{'s' * several} computed for {most:.0f} % of the time{' at most' * several}: "
            f"the input does not come fast enough, or steps are too small. {_REMEDY}"
        )
    if least < most / 2:
        return (
            f"GPU {idlest} computed for {least:.0f} % of the time, and GPU {busiest} for "
            f"{most:.0f} %: the one waits, most often for its data, and the others for it. "
            f"{_REMEDY}"
        )
    return ""


def is_reading(name: str) -> bool:
    """Return whether a name is that of a reading, not of a loss or metric."""
    return bool(re.match(r"(gpu|tpu)_\d+_|machine_|cpu_utilization$|memory_gib$", name))


def _warn(sentence: str) -> None:
    here = f"Process {processes.index()}: " if processes.count() > 1 else ""
    warnings.warn(here + sentence, stacklevel=3)


Sums = dict[str, tuple[float, float, float]]  # of each reading: peak, sum over seconds, seconds


def add(sums: Sums, values: Mapping[str, float], seconds: float) -> None:
    """Add readings that stand for some seconds."""
    for name, value in values.items():
        peak, total, of = sums.get(name, (value, 0.0, 0.0))
        sums[name] = max(peak, value), total + value * seconds, of + seconds


def values_of(sums: Sums) -> dict[str, float]:
    """Return the mean of each reading over time, or the peak of memory and temperature."""
    return {
        name: peak if name.endswith(_PEAKS) else total / seconds
        for name, (peak, total, seconds) in sums.items()
    }


class _Sampler:
    """Reads sources in a thread, until `end` or the end of the program.

    A source that raises is not called again; `failures` has a sentence about it.
    """

    def __init__(self, sources: Iterable[Source], interval_seconds: float) -> None:
        self.failures: list[str] = []
        self.readings = 0
        self._sums: Sums = {}
        self._sources = [*sources]
        self._interval = interval_seconds
        self._since: float | None = None  # time of the previous reading; None while paused
        self._lock = threading.Lock()  # guards all of the above
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kdpkit devices", daemon=True)
        self._thread.start()

    def count(self, *, again: bool = False) -> None:
        """Count from now on; `again` discards earlier readings."""
        with self._lock:
            if again:
                self.readings, self._sums = 0, {}
            self._read()  # sources that report the time since the last reading start here
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Count up to now, then stop."""
        with self._lock:
            self._add()
            self._since = None

    def values(self) -> dict[str, float]:
        """Return the mean of each reading over time, or the peak of memory and temperature."""
        return values_of(self._sums)

    def end(self) -> None:
        """End the thread."""
        self._has_ended.set()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._has_ended.wait(self._interval):
            with self._lock:
                self._add()

    def _add(self) -> None:
        """Read, for the time since the previous reading."""
        if self._since is None:
            return
        values, now = self._read(), time.perf_counter()
        seconds = max(now - self._since, 1e-6)  # the clock's resolution
        self.readings, self._since = self.readings + 1, now
        add(self._sums, values, seconds)

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for source in [*self._sources]:
            try:
                values |= {name: float(value) for name, value in source().items()}
            except Exception as error:  # any error of a driver or a user's function
                self._sources.remove(source)
                self.failures.append(
                    f"{getattr(source, '__qualname__', source)} has no readings any more "
                    f"({type(error).__name__}: {error}). Training continues; from here on they are "
                    "NaN."
                )
        return values


# What the machine reports.


def _sources() -> Iterator[Source]:
    """Yield what can be read here, and warn about what cannot."""
    makers: dict[str, Callable[[], Source]] = {"psutil": _host}
    if gpus := _gpus_of_backend():
        makers["nvidia-ml-py"] = functools.partial(_nvml, gpus)
    for package, make in makers.items():
        try:
            yield make()
        except Exception as error:  # NVML raises errors of its own
            _warn(
                f"`{package}` cannot be used ({type(error).__name__}: {error}). Training continues "
                f"without its readings; `pip install {package}` installs it."
            )
    yield {"jax": _peaks_on_jax, "tensorflow": _peaks_on_tensorflow}.get(
        keras.backend.backend(), dict
    )


def _host() -> Source:
    import psutil

    process, cores = psutil.Process(), machine.cores()

    def host() -> dict[str, float]:
        memory = psutil.virtual_memory()
        return {
            "cpu_utilization": process.cpu_percent(None) / cores,  # since the last call
            "memory_gib": process.memory_info().rss / _GIB,
            "machine_cpu_utilization": psutil.cpu_percent(None),
            "machine_memory_gib": (memory.total - memory.available) / _GIB,
        }

    return host


def _nvml(gpus: Iterable[int]) -> Source:
    """Return what reads GPUs, by the numbers that CUDA shows to this process."""
    import pynvml as nvml

    nvml.nvmlInit()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = {} if shown is None else dict(enumerate(map(str.strip, shown.split(","))))
    handles = {}
    for gpu in gpus:
        name = names.get(gpu, str(gpu))
        find, by_index = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByIndex
        handles[gpu] = by_index(int(name)) if name.isdecimal() else find(name)
    celsius = nvml.NVML_TEMPERATURE_GPU
    reads: dict[str, Callable[[Any], float]] = {
        "utilization": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_gib": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB,
        "temperature_celsius": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, celsius),
        "power_watts": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    }

    def read_gpus() -> dict[str, float]:
        values = {}
        for gpu, handle in handles.items():
            for name, read in reads.items():
                with contextlib.suppress(nvml.NVMLError_NotSupported):  # on some GPUs, and on MIG
                    values[f"gpu_{gpu}_{name}"] = read(handle)
        return values

    return read_gpus


def _gpus_of_backend() -> list[int]:
    """Return the CUDA numbers of the GPUs that the backend trains on."""
    if keras.backend.backend() == "jax":
        return sorted(number for kind, number, _ in _devices_of_jax() if kind == "gpu")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.get_visible_devices("GPU")
        return [int(gpu.name.rpartition(":")[2]) for gpu in gpus]  # "/physical_device:GPU:0"
    return []


def _devices_of_jax() -> Iterator[tuple[str, int, Any]]:
    import jax

    for device in jax.local_devices():
        number = device.local_hardware_id
        yield device.platform, device.id if number is None else number, device


def _peaks_on_jax() -> dict[str, float]:
    """Return the peak since the program started; CPUs report none."""
    stats = {f"{kind}_{n}": device.memory_stats() or {} for kind, n, device in _devices_of_jax()}
    return {
        f"{name}_peak_memory_gib": found["peak_bytes_in_use"] / _GIB
        for name, found in stats.items()
        if "peak_bytes_in_use" in found
    }


def _peaks_on_tensorflow() -> dict[str, float]:
    """Return the peak since the last call, of what arrays and programs used of each GPU."""
    import tensorflow as tf

    memory, found = tf.config.experimental, {}
    parts = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
    for i in range(sum(len(of_one or [None]) for of_one in parts)):  # of this process alone
        with contextlib.suppress(ValueError):  # an allocator without statistics
            found[f"gpu_{i}_peak_memory_gib"] = memory.get_memory_info(f"GPU:{i}")["peak"] / _GIB
            memory.reset_memory_stats(f"GPU:{i}")
    return found
