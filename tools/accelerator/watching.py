"""What watching a run costs, and whether what it shows is true."""

import math
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any

import numpy as np

from tools.accelerator import bert, device
from tools.accelerator.results import Results
from tools.accelerator.speed import size_of
from tools.benchmarks.paired import Row, Spread, compared, in_turns, seconds_of

CALLS = (1, 8, 32)  # steps of each


def measure(results: Results, *, rehearse: bool) -> None:
    """Measure one after the other: they share the device."""
    results.add(*_steps_per_execution(steps=64 if rehearse else 512, rounds=1 if rehearse else 7))
    results.add(_pause_of_resume(rehearse=rehearse))
    _readings(results, rehearse=rehearse)
    if device.current().count > 1:
        results.add(*_replicas(rehearse=rehearse))
    else:
        results.miss("watching: several devices: there is one.")


def _mlp(width: int = 64, batch: int = 64, **settings: Any) -> Any:
    from kdpkit.training import replica_exact

    model, data = _mlp_model(width, batch)
    model.compile(*bert.compiled_parts(), **settings)
    return replica_exact(model), data


def _mlp_model(width: int, batch: int) -> tuple[Any, Any]:
    import keras

    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((width,)), layers.Dense(width, "relu"), layers.Dense(10)])
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")
    return model, (x, np.arange(batch) % 10)


def _steps_per_execution(steps: int, rounds: int) -> list[Row]:
    """Measure a model whose step is nothing but overhead."""
    from tools.accelerator import jax_training

    model, batch = _mlp_model(64, 64)
    model.compile(*bert.compiled_parts())
    by_hand, _ = _mlp_model(64, 64)
    contestants = {
        "stock fit": jax_training.by_fit(model, batch, steps),
        "a bare loop": jax_training.by_hand(by_hand, *bert.compiled_parts(), batch, steps),
    }
    for count in CALLS:
        exact, _ = _mlp(steps_per_execution=count)
        contestants[count] = jax_training.by_fit(exact, batch, steps)
    figures = in_turns(
        {name: lambda of=of: 1e6 * seconds_of(of) / steps for name, of in contestants.items()},
        rounds,
    )
    return [
        compared(
            f"tiny model, {count} steps a call, against {other}",
            "us a step",
            figures[count],
            figures[other],
        )
        for count in CALLS
        for other in ("stock fit", "a bare loop")
    ]


def _pause_of_resume(*, rehearse: bool) -> Row:
    """Measure how long BERT-base waits at the end of an epoch that `Resume` saves."""
    import keras

    from kdpkit.callbacks import Resume
    from tools.accelerator.jax_training import Repeated

    size = size_of(bert, rehearse=rehearse)
    model = bert.exact_of(size)
    starts, ends = [], []
    before, after = (
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, times=times: times.append(time.perf_counter())
        )
        for times in (starts, ends)
    )
    data = Repeated(bert.batch_of(size), 4 * size.steps)  # a save waits for the one before
    with tempfile.TemporaryDirectory() as directory:
        resume = Resume(directory)
        callbacks = [before, resume, after]
        model.fit(resume.track(data), epochs=5, callbacks=callbacks, shuffle=False, verbose=0)
    pauses = [1e3 * (end - start) for start, end in zip(starts, ends, strict=True)]
    gib = sum(4 * math.prod(of.shape) for of in model.optimizer.variables) / 2**30
    note = f"{gib:.2f} GiB of optimizer state in each"
    return Row("BERT-base, pause of Resume", "ms", Spread.of(pauses[1:]), note=note)


def _readings(results: Results, *, rehearse: bool) -> None:
    """Compare `DeviceMonitor` with `nvidia-smi`, while a model trains that keeps the GPU busy."""
    from kdpkit.callbacks import DeviceMonitor
    from tools.accelerator import jax_training

    width, batch, seconds = (64, 64, 0.5) if rehearse else (4096, 8192, 5.0)
    model, data = _mlp(width=width, batch=batch)
    epoch = jax_training.by_fit(model, data, 20)
    epoch()  # compiles
    steps = max(20, int(20 * seconds / seconds_of(epoch)))
    shown: list[tuple[float, float]] = []
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(shown, stop))
    watcher.start()
    repeated = jax_training.Repeated(data, steps)
    monitor = DeviceMonitor(0.2)
    history = model.fit(repeated, callbacks=[monitor], shuffle=False, verbose=0).history
    stop.set()
    watcher.join()
    if not shown:
        results.miss("watching: readings: there is no nvidia-smi to compare them with.")
        return
    utilization, gib = zip(*shown, strict=True)
    for name, unit, other in (
        ("gpu_0_utilization", "%", float(np.mean(utilization))),
        ("gpu_0_memory_gib", "GiB", max(gib)),
    ):
        what = f"DeviceMonitor, {name}, against nvidia-smi"
        results.add(compared(what, unit, history[name], [other]))


def _watch(shown: list[tuple[float, float]], stop: threading.Event) -> None:
    command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--id=0"]
    while shutil.which("nvidia-smi") and not stop.wait(0.2):
        printed = subprocess.check_output([*command, "--format=csv,noheader,nounits"], text=True)
        utilization, mebibytes = map(float, printed.split(","))
        shown.append((utilization, mebibytes / 1024))


def _replicas(*, rehearse: bool) -> list[Row]:
    """Measure the same global batch on 1, 2, 4 and 8 devices."""
    from kdpkit import sharding
    from tools.accelerator.jax_training import by_fit

    counts = [count for count in (1, 2, 4, 8) if count <= device.current().count]
    size, rounds = (64, 1) if rehearse else (1024, 5)
    epochs = {}
    for count in counts:
        with sharding.DataParallel(count).scope():
            epochs[count] = by_fit(*_mlp(width=size, batch=size), 20)
    figures = in_turns(
        {count: lambda of=of: 50 * seconds_of(of) for count, of in epochs.items()}, rounds
    )
    what = "dense model, {} devices, same global batch, against one"
    return [
        compared(what.format(count), "ms a step", figures[count], figures[1])
        for count in counts[1:]
    ]
