"""Contestants on one workload, each in its own process: each alternates with the kit.

All start and build their models together. Then one after the other compiles, and trains in turn
with the kit, so that no more than two have a step's memory on the device.

A workload is a module with `SIZES` (by whether it is a rehearsal), `work(size)`, what contestants
train (`plain_model_of`, `compiled_parts`, `exact_of`, `torch_of`, `batch_of`), and `MORE` settings
of the kit's model, by name; `AGAINST` names contestants where not all take part.

    python -m tools.accelerator.speed tools.accelerator.bert kdpkit [--rehearse]
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from tools.accelerator import device
from tools.accelerator.results import Results
from tools.benchmarks.contestant import Contestant, serve
from tools.benchmarks.paired import Row, Spread, compared, in_turns

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
    rows_of = functools.partial(_rows, title, work)
    ways = [*getattr(workload, "AGAINST", WAYS), *workload.MORE]
    names = [name for name in ways if _is_installed(name)]
    for name in {*ways} - {*names}:
        results.miss(f"{title}: {name} has no figures: PyTorch is not installed.")
    one_at_a_time = device.current().platform == "tpu"  # it serves one process
    with contextlib.ExitStack() as ends:
        start = functools.partial(_started, ends, workload.__name__, rehearse)
        waiting = {} if one_at_a_time else {name: start(name) for name in names}
        ours = waiting.get(OURS) or start(OURS)
        alone = in_turns({OURS: ours.seconds}, rounds)[OURS]
        results.add(*rows_of(OURS, alone, [], ours.peak_bytes()))
        if one_at_a_time:
            ours.end()
        for name in names:
            if name == OURS:
                continue
            other = waiting.get(name) or start(name)
            both = {name: other.seconds} | ({} if one_at_a_time else {OURS: ours.seconds})
            seconds = in_turns(both, rounds)
            if any(map(math.isnan, seconds[name])):
                results.miss(f"{title}: {name} has no figures: it failed, see its output.")
            else:
                beside = seconds.get(OURS, alone)
                results.add(*rows_of(name, seconds[name], beside, other.peak_bytes()))
            other.end()


def _started(ends: contextlib.ExitStack, workload: str, rehearse: bool, name: str) -> Contestant:
    command = [sys.executable, "-m", "tools.accelerator.speed", workload, name]
    contestant = Contestant([*command, *(["--rehearse"] if rehearse else [])], os.environ)
    ends.callback(contestant.end)
    return contestant


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


def _rows(
    title: str, work: Work, name: str, seconds: list[float], ours: list[float], peak: int | None
) -> Iterator[Row]:
    if ours:
        rates = ([work.count / second for second in of] for of in (ours, seconds))
        yield compared(f"{title}, against {name}", f"{work.unit}/s", *rates)
    if limit := device.current().peak_flops:
        shares = Spread.of([100 * work.flops / second / limit for second in seconds])
        yield Row(f"{title}, {name}, share of the peak (MFU)", "%", shares)
    if peak:
        yield Row(f"{title}, {name}, peak of memory", "GiB", Spread.of([peak / 2**30]))


# What follows runs in a contestant's process.


def _kdpkit(workload: Any, size: Any, **settings: Any) -> Any:
    from tools.accelerator import jax_training

    model = workload.exact_of(size, **settings)
    return jax_training.by_fit(model, workload.batch_of(size), size.steps)


def _stock_fit(workload: Any, size: Any) -> Any:
    from tools.accelerator import jax_training

    model = workload.plain_model_of(size)
    model.compile(*workload.compiled_parts())
    return jax_training.by_fit(model, workload.batch_of(size), size.steps)


def _by_hand(workload: Any, size: Any) -> Any:
    from tools.accelerator import jax_training

    model, batch = workload.plain_model_of(size), workload.batch_of(size)
    return jax_training.by_hand(model, *workload.compiled_parts(), batch, size.steps)


def _torch(workload: Any, size: Any, *, compiled: bool) -> Any:
    from tools.accelerator import torch_training

    model, loss_of, batch, optimizer = workload.torch_of(size)
    return torch_training.trained(model, loss_of, batch, size.steps, optimizer, compiled=compiled)


WAYS: dict[str, Callable[..., Any]] = {
    OURS: _kdpkit,
    "stock fit": _stock_fit,
    "a bare JAX loop": _by_hand,
    "PyTorch compiled": functools.partial(_torch, compiled=True),
    "PyTorch eager": functools.partial(_torch, compiled=False),
}


def main(module: str, way: str, *flags: str) -> None:
    """Build a contestant, and train whenever it is asked to; the first epoch compiles."""
    workload = importlib.import_module(module)
    size = size_of(workload, rehearse="--rehearse" in flags)
    epoch = WAYS.get(way, _kdpkit)(workload, size, **workload.MORE.get(way, {}))
    if way.startswith("PyTorch"):
        from tools.accelerator import torch_training

        serve(epoch, torch_training.peak_bytes)
    else:
        serve(epoch, device.peak_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
