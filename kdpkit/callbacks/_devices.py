"""How busy the devices are while a model trains, how much memory they need, and which one waits."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from kdpkit import _checks, _processes
from kdpkit.callbacks import _calls, _readings
from kdpkit.callbacks._sampling import Sampler, Source, Summary

_BUSY = 50  # percent of the time; below, a GPU is idle for most of it
_ENOUGH = 10  # readings in an epoch, to judge by
_REMEDY = (
    "`kdpkit.pipelines.measure(train)` tells what the input pipeline gives and where its time goes."
)


class DeviceMonitor(keras.callbacks.Callback):
    """Puts into the logs of each epoch how busy the devices were, and how much memory they needed.

    A thread reads them every `interval_seconds` while training steps run; validation, and the first
    execution of a `fit`, in which the step is compiled, are left out (unless the epoch has no
    other). History, `CSVLogger` and `TensorBoard`, later in the list, get for each epoch:

    | name | of what | unit |
    | --- | --- | --- |
    | `gpu_0_utilization` | time in which the GPU computed anything, mean | % |
    | `gpu_0_memory_gib` | memory taken of the GPU, by all programs, peak | GiB |
    | `gpu_0_peak_memory_gib` | of that, what this process' arrays and programs needed, peak | GiB |
    | `gpu_0_temperature_celsius` | peak | °C |
    | `gpu_0_power_watts` | mean | W |
    | `cpu_utilization` | of all cores that this process may use, by this process, mean | % |
    | `memory_gib` | memory of this process, peak | GiB |
    | `machine_cpu_utilization` | of all cores of the machine, by all programs, mean | % |
    | `machine_memory_gib` | memory of the machine that is taken, peak | GiB |

    GPUs are those that the backend trains on, numbered as CUDA shows them to it; NVML
    (`nvidia-ml-py`) reads them. The peak of arrays and programs is what TensorFlow (GPUs) or JAX
    (GPUs and TPUs, as `tpu_0_peak_memory_gib`) says; on JAX that is the highest since the program
    began. All else comes from `psutil`. What a machine does not tell is not in the logs.

    Where one GPU is busy for less than half as long as another, or none for half of the time, a
    warning says so, once in a training: it waits, most often for its data. Of several processes
    each looks at its own devices and warns, and the first one has its readings in the logs.

    Training is never held up, and never stopped: readings that fail end with a sentence, and are
    NaN from there on. The thread ends with the call that trains, however that ends.

    Args:
        interval_seconds: From one reading to the next.
        sources: Functions that give numbers by name, read in place of all of the above. Of names
            that end in `memory_gib` and `temperature_celsius` the peak is logged, of others the
            mean over time; a `gpu_3_utilization` is judged as above. They are called in a thread.

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
        self.interval_seconds = _checks.number("interval_seconds", interval_seconds, above=0)
        self.sources = None if sources is None else [*sources]
        for source in self.sources or ():
            if not callable(source):
                _checks.refuse("`sources` must be functions of no argument.", source=source)
        self._sampler: Sampler | None = None
        self._names: dict[str, float] = {}  # that the logs have had, each as NaN
        self._executions = 0
        self._has_warned = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to read."""
        self._end()  # the thread of a training before this one that has failed
        found, missing = (self.sources, []) if self.sources is not None else _readings.sources()
        for sentence in missing:
            _warn(sentence)
        self._names, self._executions, self._has_warned = {}, 0, False
        call = _calls.training_call(sys._getframe(1))
        self._sampler = Sampler(found, self.interval_seconds, call)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to count."""
        if self._sampler:
            self._sampler.begin()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the first execution, which has compiled the step."""
        self._executions += 1
        if self._executions == 2 and self._sampler:
            self._sampler.begin()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Leave validation out."""
        if self._sampler:
            self._sampler.pause()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Count again."""
        if self._sampler:
            self._sampler.go_on()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log what the epoch's readings come to, and warn of GPUs that wait."""
        if self._sampler is None:
            return
        summary = self._sampler.finish()
        self._warn_of_failures()
        self._log(summary.values(), logs)
        if self._executions > 1:
            self._judge(summary, epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the thread."""
        self._warn_of_failures()
        self._end()

    def _end(self) -> None:
        if self._sampler:
            self._sampler.end()
        self._sampler = None

    def _warn_of_failures(self) -> None:
        for sentence in self._sampler.take_failures() if self._sampler else ():
            _warn(sentence)

    def _log(self, values: dict[str, float], logs: dict[str, Any] | None) -> None:
        # A name that was there stays, so that History has a number for every epoch.
        self._names |= dict.fromkeys(values, math.nan)
        if logs is not None and _processes.index() == 0:
            logs |= self._names | values

    def _judge(self, summary: Summary, epoch: int) -> None:
        if self._has_warned or summary.readings < _ENOUGH:
            return
        said = starving(_utilizations(summary.values()))
        if said:
            self._has_warned = True
            _warn(f"Epoch {epoch + 1}: {said}")


def starving(utilizations: Mapping[int, float]) -> str:
    """Say which GPUs wait, most often for their data; nothing if none does.

    In synchronous training a GPU that waits for the others' gradients counts as busy: NCCL's
    programs run on it. So the one that is not busy is the one that all wait for.

    Args:
        utilizations: The mean of each GPU's, in percent, by its number.

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
    """Tell the names of readings from those of losses and metrics."""
    return bool(re.match(r"(gpu|tpu)_\d+_|machine_|cpu_utilization$|memory_gib$", name))


def _utilizations(values: Mapping[str, float]) -> dict[int, float]:
    found = {re.fullmatch(r"gpu_(\d+)_utilization", name): name for name in values}
    return {int(match[1]): values[name] for match, name in found.items() if match}


def _warn(sentence: str) -> None:
    here = f"Process {_processes.index()}: " if _processes.count() > 1 else ""
    warnings.warn(here + sentence, stacklevel=3)
