"""Utilization and memory of the devices during training, and a warning for idle GPUs."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from kdpkit._internal import checks, processes
from kdpkit.callbacks import _readings
from kdpkit.callbacks._sampling import Sampler, Source

_BUSY = 50  # percent; below it a GPU is idle most of the time
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
        self._sampler: Sampler | None = None
        self._names: dict[str, float] = {}  # names logged so far, each with NaN
        self._executions = 0
        self._has_warned = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the sources."""
        self.on_train_end()  # of an earlier training that failed
        found, missing = (self.sources, []) if self.sources is not None else _readings.sources()
        for sentence in missing:
            _warn(sentence)
        self._names, self._executions, self._has_warned = {}, 0, False
        self._sampler = Sampler(found, self.interval_seconds)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start counting."""
        if self._sampler:
            self._sampler.begin()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Discard the first execution, which compiled the step."""
        self._executions += 1
        if self._sampler and self._executions == 2:
            self._sampler.begin()
        elif self._sampler:
            self._sampler.note_progress()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Exclude validation."""
        if self._sampler:
            self._sampler.pause()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Count again."""
        if self._sampler:
            self._sampler.resume()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the epoch's readings, and warn about GPUs that wait."""
        if self._sampler is None:
            return
        summary, failures = self._sampler.finish()
        for sentence in failures:
            _warn(sentence)
        values = summary.values()
        # Earlier names stay, so History has a number for every epoch.
        self._names |= dict.fromkeys(values, math.nan)
        if logs is not None and processes.index() == 0:
            logs |= self._names | values
        problem = starving(_utilizations(values)) if summary.readings >= _ENOUGH else ""
        if problem and self._executions > 1 and not self._has_warned:
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


def _utilizations(values: Mapping[str, float]) -> dict[int, float]:
    found = {re.fullmatch(r"gpu_(\d+)_utilization", name): name for name in values}
    return {int(match[1]): values[name] for match, name in found.items() if match}


def _warn(sentence: str) -> None:
    here = f"Process {processes.index()}: " if processes.count() > 1 else ""
    warnings.warn(here + sentence, stacklevel=3)
