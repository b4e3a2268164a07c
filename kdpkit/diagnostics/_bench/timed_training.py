"""The time of a training step, with so many replicas and examples."""

import argparse
import sys
from typing import Any

import keras
import numpy as np

from kdpkit import batches, experiment
from kdpkit.callbacks import _readings
from kdpkit.diagnostics import _machine
from kdpkit.diagnostics._bench import workloads
from kdpkit.diagnostics._speed import trial_runs

_GIB = 2**30


def measured(
    *,
    workload: str | None,
    target: str | None,
    replicas: int,
    per_replica_batch_size: int | None,
    seconds: float,
    rounds: int,
    jit: bool | str | None,
    split: bool,
) -> dict[str, Any]:
    """Train, and return the seconds of a step in each round, and the memory that was needed.

    Args:
        workload: `"cnn"` or `"bert"`; None where there is a target.
        target: `file.py:name` of a function that returns (dataset, model).
        replicas: That share a batch.
        per_replica_batch_size: None takes the size of the target's own batches.
        seconds: To train for, besides the steps that warm up.
        rounds: To divide them into.
        jit: As in `TrainingLoop`.
        split: Whether one GPU may be split for several replicas.
    """
    strategy = _strategy(replicas, split=split)
    allocations = _readings.Allocations()  # counts from here
    if target is not None:
        trainer, examples = workloads.of_target(strategy, target)
    else:
        trainer, examples = getattr(workloads, str(workload))(strategy, jit)
    size = per_replica_batch_size or batches.rows_of(examples)
    training = trial_runs.Trainer(trainer, batch_of(examples, size * replicas))
    training.seconds_per_step(training.held, 0.0)  # compiles
    while training.is_loop and trainer.jit is None:  # it tries XLA
        training.seconds_per_step(training.held, 0.0)
    times = [training.seconds_per_step(training.held, seconds / rounds) for _ in range(rounds)]
    peaks = allocations().values()
    return {
        "per_replica_batch_size": size,
        "seconds_of_steps": times,
        "where": experiment.describe(strategy).partition(": ")[2],
        "accelerators": _accelerators(),
        "peak_memory_gib": max(peaks) if peaks else _peak_of_process(),
        "memory_of": "device" if peaks else "process",
    }


def _strategy(replicas: int, *, split: bool) -> Any:
    """Choose devices: GPUs if there are some, which are split if that is asked for, else CPUs."""
    kind = "mirrored" if replicas > 1 else "one"
    if keras.backend.backend() == "tensorflow" and _accelerators() and not split:
        from kdpkit import strategies

        return strategies.select_strategy(kind, devices=replicas)
    return experiment.strategy_from(argparse.Namespace(strategy=kind, replicas=replicas))


def _accelerators() -> int:
    """Count the devices besides the CPU that the backend trains on."""
    if keras.backend.backend() == "jax":
        import jax

        return 0 if jax.default_backend() == "cpu" else jax.device_count()
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def batch_of(examples: Any, count: int) -> Any:
    """Repeat examples to a batch of so many; raise before one that no memory holds is made."""
    size = batches.rows_of(examples)
    parts = [part for part in keras.tree.flatten(examples) if part is not None]
    needed, present = sum(part.nbytes for part in parts) / size * count, _machine.memory_bytes()
    if present is not None and needed > present:
        raise MemoryError(
            f"The examples of a batch alone need {needed / _GIB:,.1f} GiB, and there are "
            f"{present / _GIB:,.1f}."
        )
    chosen = np.arange(count) % size
    return keras.tree.map_structure(lambda part: part if part is None else part[chosen], examples)


def _peak_of_process() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB
