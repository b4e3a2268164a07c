"""Contestants on one workload, each in its own process: they prepare together, train alternately.

A workload is a module with `SIZES` (by whether it is a rehearsal), `WAYS` (by name a function of a
size that returns an epoch) and `work(size)`.

    python -m tests.accelerator.speed tests.accelerator.bert kdpkit [--rehearse]
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

from tests.accelerator import device
from tests.accelerator.results import Results
from tests.benchmarks.contestant import Contestant, serve
from tests.benchmarks.paired import Row, Spread, compared, in_turns

OURS = "kdpkit"


@dataclasses.dataclass(frozen=True)
class Work:
    """What an epoch of a workload is.

    Attributes:
        unit: What is counted, such as `"tokens"`.
        count: Of these in an epoch.
        flops: Floating-point operations of an epoch in the products of matrices, forward and
            backward; what is computed again for the sake of memory does not count.
    """

    unit: str
    count: int
    flops: float


def measure(workload: types.ModuleType, results: Results, *, rehearse: bool, rounds: int) -> None:
    """Measure the speed of all contestants, their shares of the device's peak, and their memory."""
    title = workload.__doc__.partition(":")[0]
    size = size_of(workload, rehearse=rehearse)
    if size.batch != workload.SIZES[rehearse].batch:
        results.miss(f"{title}: batches of {size.batch}, for want of memory on the device.")
    work = workload.work(size)
    seconds, memory = {}, {}
    names = [name for name in workload.WAYS if _is_installed(name)]
    # A TPU serves one process at a time.
    groups = [[name] for name in names] if device.current().platform == "tpu" else [names]
    for group in groups:
        for name, (of_rounds, peak) in _measured(workload, group, rehearse, rounds).items():
            seconds[name], memory[name] = of_rounds, peak
    rates = {
        name: [work.count / second for second in of_rounds]
        for name, of_rounds in seconds.items()
        if not any(map(math.isnan, of_rounds))
    }
    for lost in workload.WAYS.keys() - rates.keys():
        reason = "it failed, see its output" if _is_installed(lost) else "PyTorch is not installed"
        results.miss(f"{title}: {lost} has no figures: {reason}.")
    results.add(*_rows(title, work, rates, memory))


def _is_installed(way: str) -> bool:
    wanted = ("torch", "torchvision", "transformers") if way.startswith("PyTorch") else ()
    return all(map(importlib.util.find_spec, wanted))


def size_of(workload: types.ModuleType, *, rehearse: bool) -> Any:
    """Return the size of a workload, with fewer examples on a device of less than 70 GiB."""
    size, gib = workload.SIZES[rehearse], device.current().gib
    if rehearse or not gib:
        return size
    halvings = max(0, math.ceil(math.log2(70 / gib)))
    return dataclasses.replace(size, batch=max(4, size.batch >> halvings))


def _measured(
    workload: types.ModuleType, names: list[str], rehearse: bool, rounds: int
) -> dict[str, tuple[list[float], int | None]]:
    """Return the seconds of the rounds and the peak of the memory of contestants that alternate."""
    flags = ["--rehearse"] if rehearse else []
    command = [sys.executable, "-m", "tests.accelerator.speed", workload.__name__]
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "KDPKIT_COMPILE_LOCK": directory}
        started = {name: Contestant([*command, name, *flags], environment) for name in names}
        try:
            ready = {name: one for name, one in started.items() if one.is_ready()}
            figures = in_turns({name: one.seconds for name, one in ready.items()}, rounds)
            return {name: (figures[name], one.peak_bytes()) for name, one in ready.items()}
        finally:
            for one in started.values():
                one.end()


def _rows(
    title: str, work: Work, rates: dict[str, list[float]], memory: dict[str, int | None]
) -> Iterator[Row]:
    for name in rates if OURS in rates else ():
        if name != OURS:
            what = f"{title}, against {name}"
            yield compared(what, f"{work.unit}/s", rates[OURS], rates[name])
    for name, rate in rates.items():
        if peak := device.current().peak_flops:
            shares = [100 * each * work.flops / work.count / peak for each in rate]
            yield Row(f"{title}, {name}, share of the peak (MFU)", "%", Spread.of(shares))
        if gib := (memory[name] or 0) / 2**30:
            yield Row(f"{title}, {name}, peak of memory", "GiB", Spread.of([gib]))


@contextlib.contextmanager
def compiling(framework: str) -> Iterator[None]:
    """Compile alone among the processes of this framework: compilers time candidates as they go."""
    with pathlib.Path(os.environ["KDPKIT_COMPILE_LOCK"], framework).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(module: str, way: str, *flags: str) -> None:
    """Prepare a contestant, and train whenever it is asked for."""
    workload = importlib.import_module(module)
    epoch: Callable[[], object] = workload.WAYS[way](
        size_of(workload, rehearse="--rehearse" in flags)
    )
    is_torch = way.startswith("PyTorch")
    with compiling("torch" if is_torch else "jax"):
        epoch()
    if is_torch:
        from tests.accelerator import torch_training

        serve(epoch, torch_training.peak_bytes)
    else:
        serve(epoch, device.peak_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
