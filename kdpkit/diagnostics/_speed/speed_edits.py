"""The edits that may make a training faster: what each is, and how it is tried."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kdpkit.batches import ArrayBatches
from kdpkit.diagnostics import _batch, _machine
from kdpkit.diagnostics._python_time import PythonWatch
from kdpkit.diagnostics._speed_callbacks import names_of
from kdpkit.diagnostics._speed_report import SpeedEdit
from kdpkit.diagnostics._speed_runs import Trainer

_AT_ONCE = 16  # steps in a call
_SHORT_SECONDS = 0.02  # of a step; the call of a longer one counts for nothing beside it
_WORKERS = 4  # threads of a `PyDataset`
_MOST_MEMORY = 0.5  # of the machine's
_HELPS = 1.1  # times as fast, from which on an edit is worth its while
_ALIKE = 1.25  # times: step times nearer to each other are alike
_PARTS = {"input-bound": "waiting", "host-bound": "host", "compute-bound": "computing"}


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """An edit that can be tried.

    Attributes:
        part: What it shortens: `"waiting"`, `"computing"` or `"host"`.
        text: What to do.
        run: Trains with the edit for some seconds, and gives the time of a step.
        beside: The run without the edit: `"real"`; or, on a held batch, `"called"` with callbacks
            or `"held"` without.
        memory: Whether it keeps the data in memory.
    """

    part: str
    text: str
    run: Callable[[float], float]
    beside: str
    memory: bool = False


def ranked(edits: Iterable[SpeedEdit], verdict: str) -> tuple[SpeedEdit, ...]:
    """Give the edits that help, what makes a step shortest first.

    Those alike stand in the order in which they ask for no memory; those whose effect is not known
    come last, and only where they bear on the verdict.
    """
    known = [edit for edit in edits if edit.speedup and edit.speedup >= _HELPS]
    known.sort(key=lambda edit: edit.step_seconds or 0.0)
    best = known[0].step_seconds or 0.0 if known else 0.0
    known.sort(key=lambda edit: (edit.step_seconds or 0.0) > _ALIKE * best or edit.needs_memory)
    unknown = [e for e in edits if e.step_seconds is None and e.part == _PARTS[verdict]]
    return (*known, *dict.fromkeys(unknown))


def without_gain(edits: Iterable[SpeedEdit]) -> Iterator[str]:
    """Name what was tried and makes no difference."""
    for edit in edits:
        if edit.speedup and edit.speedup < _HELPS:
            yield f"Tried, and of no use here ({edit.speedup:.2f} times as fast): {edit.text}"


# The host's part: Python, callbacks, calls.


def of_host(trainer: Trainer, step_seconds: float, callbacks: list[Any]) -> Iterator[Trial]:
    """Give what takes work from the host."""
    for callback in callbacks:
        others = [other for other in callbacks if other is not callback]
        yield Trial(
            "host",
            f"Leave {names_of([callback])} out, or let it act every hundredth step.",
            functools.partial(trainer.seconds_per_step, trainer.held, callbacks=others),
            "called",
        )
    model = trainer.model
    if not trainer.is_loop and model.run_eagerly:
        on_jax = {"jit_compile": True} if _is_on_jax() else {}
        yield _held(
            trainer,
            "host",
            "Compile the model with `run_eagerly=False`.",
            run_eagerly=False,
            **on_jax,
        )
    elif not trainer.is_loop and _is_on_jax() and not model.jit_compile:
        yield _held(trainer, "host", "Compile the model with `jit_compile=True`.", jit_compile=True)
    elif step_seconds < _SHORT_SECONDS:
        yield _many_steps_in_a_call(trainer)


def _many_steps_in_a_call(trainer: Trainer) -> Trial:
    if not trainer.is_loop:
        count = _AT_ONCE * trainer.model.steps_per_execution
        text = f"Compile the model with `steps_per_execution={count}`."
        return _held(trainer, "host", text, steps_per_execution=count)
    count = _AT_ONCE * trainer.trainer.steps_per_loop
    text = f"Give the loop `steps_per_loop={count}`."
    return _held(trainer, "host", text, of=trainer.trainer, steps_per_loop=count)


def _held(trainer: Trainer, part: str, text: str, of: Any = None, **settings: Any) -> Trial:
    """Try settings of the model, or of something else, on a held batch."""
    owner = trainer.model if of is None else of

    def run(seconds: float) -> float:
        with trainer.changed(owner, **settings):
            return trainer.seconds_per_step(trainer.held, seconds)

    return Trial(part, text, run, "held")


def without_python(watch: PythonWatch, python_seconds: float, real: float) -> SpeedEdit:
    """Give the edit for Python inside of the step, which only its user can make."""
    framework = "JAX" if _is_on_jax() else "TensorFlow"
    step = max(real - python_seconds, 0.01 * real)
    return SpeedEdit(
        "host",
        f"Write {watch.longest} in operations of {framework}, or take it out of the step.",
        step,
        real / step,
        tried=False,
    )


# Input.


def of_input(dataset: Any, real: Callable[[Any], float]) -> Iterator[Trial]:
    """Give what makes the data come faster.

    Args:
        dataset: What is trained on.
        real: Trains on another dataset, and gives the time of a step.
    """
    if _batch.is_tf_dataset(dataset):
        from kdpkit.pipelines import _edits  # TensorFlow is there

        memory = (_machine.look().memory_gib or math.inf) * 2**30
        for edit in _edits.edits(dataset):
            size = edit.memory_bytes
            if size is None or size <= _MOST_MEMORY * memory:
                yield _of_pipeline(edit, real)
    elif isinstance(dataset, keras.utils.PyDataset) and dataset.workers < _WORKERS:
        with_workers = copy.copy(vars(dataset).get("_dataset", dataset))
        with_workers.workers = _WORKERS
        text = f"Give the dataset `workers={_WORKERS}`."
        yield Trial("waiting", text, lambda _: real(with_workers), "real")


def _of_pipeline(edit: Any, real: Callable[[Any], float]) -> Trial:
    make = functools.cache(edit.make)
    is_kept = edit.memory_bytes != 0
    text = edit.text + _of_memory(edit.memory_bytes)
    return Trial("waiting", text, lambda _: real(make()), "real", memory=is_kept)


def _of_memory(size: int | None) -> str:
    if size == 0:
        return ""
    if size is None:
        return " It needs memory for all of the data."
    return f" It needs {size / 2**20:,.0f} MiB of memory."


def untried_of_input(dataset: Any) -> Iterator[SpeedEdit]:
    """Give what else may make the data come faster, and must be tried by hand."""
    if _batch.are_arrays(dataset) or isinstance(dataset, ArrayBatches):
        text = "Use larger batches: the data are in memory, and cutting batches is what takes time."
        yield SpeedEdit("waiting", text, tried=False)
        return
    if not _batch.is_tf_dataset(dataset):
        text = "Prepare the data once, beforehand, and hold it in arrays or files."
        yield SpeedEdit("waiting", text, tried=False)
        return
    from kdpkit import pipelines  # TensorFlow is there

    for finding in pipelines.lint(dataset, training=False):
        if finding.level == "slow" and not finding.rule.startswith(("serial", "no-prefetch")):
            yield SpeedEdit("waiting", f"{finding.where}: {finding.remedy}", tried=False)
    yield SpeedEdit(
        "waiting",
        "Have other processes prepare the examples: `train_pipeline(..., services=[...])`.",
        tried=False,
    )


# Computing.


def of_computing(trainer: Trainer) -> Iterator[Trial]:
    """Give what makes the device compute faster."""
    if _is_on_jax() or trainer.replicas > 1:
        return
    if not trainer.is_loop:
        if not trainer.model.jit_compile:
            text = "Compile the model with `jit_compile=True`."
            yield _held(trainer, "computing", text, jit_compile=True)
        return
    steps = trainer.trainer._steps
    if not steps.jit and steps._jit != "measure":  # which tries it by itself
        yield _held(trainer, "computing", "Give the loop `jit=True`.", of=steps, _jit=True)


def untried_of_computing(trainer: Trainer) -> Iterator[SpeedEdit]:
    """Give what else may make the device compute faster, and must be tried by hand."""
    if _has_gpu() and trainer.model.dtype_policy.compute_dtype == "float32":
        text = "Compute in half precision: `keras.config.set_dtype_policy('mixed_bfloat16')`."
        yield SpeedEdit("computing", text, tried=False)
    yield SpeedEdit(
        "computing",
        "Train on more replicas; `kdpkit plan` works out batches, steps and rates.",
        tried=False,
    )


def _has_gpu() -> bool:
    devices = keras.distribution.list_devices()  # asked for GPUs alone, JAX raises without any
    return any(device.lower().startswith(("gpu", "cuda", "rocm")) for device in devices)


def _is_on_jax() -> bool:
    return bool(keras.backend.backend() == "jax")
