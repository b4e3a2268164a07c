"""A training of one size, timed, in a process of its own: what `kdpkit bench` starts.

    python -m kdpkit.diagnostics._bench_child '{"workload": "cnn", "replicas": 1, ...}'

The last line says what came out, as JSON.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kdpkit import _checks

SIGN = "kdpkit-bench "  # begins the line that says what came out
MEASURED, CANNOT, NO_MEMORY, FAILED = "measured", "cannot", "out of memory", "failed"

_GIB = 2**30
_FIRST_STEPS = 2  # which compile
_STEPS_AT_ONCE = 8  # while XLA is tried, and a step is timed for the first time
_NUMBERS, _MACHINE_SECONDS = 1 << 16, 0.3
_KEPT_ROWS = 1024  # at least, and one batch
_OUT_OF_MEMORY = ("resource_exhausted", "resourceexhausted", "out of memory", "bad_alloc")


@dataclasses.dataclass(frozen=True)
class Order:
    """What to measure.

    Attributes:
        workload: `"cnn"` or `"bert"`; None where there is a target.
        target: `file.py:name` of a function that gives (dataset, model).
        replicas: That share a batch.
        per_replica_batch_size: None takes the rows of the target's own batches.
        seconds: To train for, beside the steps that warm up.
        rounds: To divide them into.
        jit: As in `TrainingLoop`.
        split: Whether one GPU may be split for several replicas.
    """

    workload: str | None
    target: str | None
    replicas: int
    per_replica_batch_size: int | None
    seconds: float
    rounds: int
    jit: Any
    split: bool


def run(order: Order) -> int:
    """Train, and say what came out; give the exit code."""
    _be_ended_first()
    try:
        found = {"result": MEASURED} | _measured(order)
    except _checks.InputError as error:
        found = {"result": CANNOT, "reason": str(error)}
    except Exception as error:  # of any kind: what training raises is to be told
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        is_memory = isinstance(error, MemoryError) or _is_memory(error)
        reason = f"{type(error).__name__}: {first}"
        found = {"result": NO_MEMORY if is_memory else FAILED, "reason": reason}
    sys.stdout.write(f"\n{SIGN}{json.dumps(found)}\n")
    sys.stdout.flush()
    return int(found["result"] != MEASURED)


def _be_ended_first() -> None:
    """Where memory runs out, let Linux end this process, and none of the user's others."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _is_memory(error: BaseException) -> bool:
    said = f"{type(error).__name__}: {error}".lower()
    return any(words in said for words in _OUT_OF_MEMORY)


def _measured(order: Order) -> dict[str, Any]:
    from kdpkit import experiment
    from kdpkit.callbacks import _readings

    strategy = _strategy(order)
    allocations = _readings.Allocations()  # counts from here
    workload = _workload(order, strategy)
    size = order.per_replica_batch_size or workload.batch_size
    training = _Training(workload, size * order.replicas)
    before = _machine_speed()
    seconds = training.rounds(order.seconds, order.rounds)
    peaks = allocations().values()
    return {
        "per_replica_batch_size": size,
        "seconds_of_steps": seconds,
        "machine_speed": min(before, _machine_speed()),
        "where": experiment.describe(strategy).partition(": ")[2],
        "accelerators": _accelerators(),
        "peak_memory_gib": max(peaks) if peaks else _peak_of_process(),
        "memory_of": "device" if peaks else "process",
    }


def _strategy(order: Order) -> Any:
    """Choose devices: GPUs if there are some, which are split if that is asked for, else CPUs."""
    import keras

    from kdpkit import experiment, strategies

    kind = "mirrored" if order.replicas > 1 else "one"
    if keras.backend.backend() == "tensorflow" and _accelerators() and not order.split:
        return strategies.select_strategy(kind, devices=order.replicas)
    return experiment.strategy_from(argparse.Namespace(strategy=kind, replicas=order.replicas))


def _accelerators() -> int:
    """Count what the backend trains on beside the CPU."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return 0 if jax.default_backend() == "cpu" else jax.device_count()
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def _workload(order: Order, strategy: Any) -> Any:
    from kdpkit.diagnostics import _workloads

    if order.target is not None:
        return _workloads.of_target(strategy, order.target)
    return {"cnn": _workloads.cnn, "bert": _workloads.bert}[str(order.workload)](
        strategy, order.jit
    )


def _machine_speed() -> float:
    """Give how often one core does a piece of work in a second: less where it has other work."""
    import numpy as np

    numbers = np.ones(_NUMBERS, "float32")
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < _MACHINE_SECONDS:
        np.sqrt(numbers, out=numbers)
        count += 1
    return count / seconds


def _peak_of_process() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


class _Training:
    """A training that goes on for as many steps as it is told, on the same rows over and over."""

    def __init__(self, workload: Any, global_batch_size: int) -> None:
        self._workload = workload
        self._batch = global_batch_size
        rows = math.ceil(_KEPT_ROWS / global_batch_size) * global_batch_size
        _refuse_too_many(rows, workload.row_bytes)
        self._rows = workload.rows(rows)
        self._batches = rows // global_batch_size

    def rounds(self, seconds: float, rounds: int) -> list[float]:
        """Give the seconds of a step in each round."""
        self._fit(_FIRST_STEPS, epochs=1)
        (step,) = self._fit(_STEPS_AT_ONCE, epochs=1)
        while not self._workload.is_decided():
            (step,) = self._fit(_STEPS_AT_ONCE, epochs=1)
        steps = max(1, round(seconds / rounds / step))
        return self._fit(steps, epochs=rounds)

    def _fit(self, steps: int, *, epochs: int) -> list[float]:
        clock = _clock()
        settings = {"epochs": epochs, "callbacks": [clock], "verbose": 0}
        self._workload.fit(self._data(steps), steps_per_epoch=steps, **settings)
        return [seconds / steps for seconds in clock.seconds]

    def _data(self, steps: int) -> Any:
        import keras

        if keras.backend.backend() == "jax":
            return _again(self._rows, self._batch, self._batches, steps)
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(self._rows)
        options = tf.data.Options()
        options.autotune.enabled = False  # dropping a tuned iterator can take a minute
        data = data.batch(self._batch, drop_remainder=True).cache().repeat()
        return data.prefetch(2).with_options(options)


def _refuse_too_many(rows: int, row_bytes: int) -> None:
    """Refuse what cannot be in memory, before the machine is slowed by an attempt."""
    from kdpkit.diagnostics import _machine

    present, needed = _machine.memory_bytes(), rows * row_bytes
    if present is not None and needed > present:
        raise MemoryError(
            f"The rows of a batch alone need {needed / _GIB:,.1f} GiB, and there are "
            f"{present / _GIB:,.1f}."
        )


def _clock() -> Any:
    """Give a callback that notes how long each epoch takes."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []
            self._began = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            self._began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs  # which hold the loss of the last step: it has been made
            self.seconds.append(time.perf_counter() - self._began)

    return Clock()


def _again(rows: Any, global_batch_size: int, batches: int, steps: int) -> Any:
    """Give the batches of some rows, over and over, for as many steps."""
    import keras

    class Again(keras.utils.PyDataset):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> Any:
            first = index % batches * global_batch_size
            return keras.tree.map_structure(
                lambda part: part[first : first + global_batch_size], rows
            )

    return Again()


if __name__ == "__main__":
    exit_code = run(Order(**json.loads(sys.argv[1])))
    sys.stderr.flush()
    if exit_code:  # without a wait for others, which would not end
        os._exit(exit_code)
