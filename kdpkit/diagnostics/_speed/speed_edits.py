"""The edits that may make a training faster: what each is, and how it is tried."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from kdpkit.diagnostics import _batch, _machine
from kdpkit.diagnostics._speed.speed_report import SpeedEdit
from kdpkit.diagnostics._speed.step_callbacks import names_of
from kdpkit.diagnostics._speed.trial_runs import Trainer

if TYPE_CHECKING:
    from kdpkit.pipelines._edits import PipelineEdit

_AT_ONCE = 16  # steps in a call
_SHORT_SECONDS = 0.02  # of a step; in a longer one the time of the call hardly matters
_WORKERS = 4  # threads of a `PyDataset`
_MOST_MEMORY = 0.5  # of the machine's
_HELPS = 1.1  # times as fast: an edit that gains less is not worth making
_ALIKE = 1.25  # the ratio below which two step times count as equal


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """An edit that can be tried.

    Attributes:
        part: What it shortens: `"waiting"`, `"computing"` or `"host"`.
        text: What to do.
        run: Trains with the edit for some seconds, and returns the time of a step.
        beside: The run without the edit: `"real"`; or, on a held batch, `"called"` with callbacks
            or `"held"` without.
        memory: Whether it keeps the data in memory.
    """

    part: str
    text: str
    run: Callable[[float], float]
    beside: str
    memory: bool = False


def ranked(edits: Sequence[SpeedEdit]) -> tuple[SpeedEdit, ...]:
    """Return the edits that help, what makes a step shortest first; of those alike what is free."""
    helping = [edit for edit in edits if edit.speedup >= _HELPS]
    best = min((edit.step_seconds for edit in helping), default=0.0)

    def rank(edit: SpeedEdit) -> tuple[bool, float]:
        return edit.step_seconds > _ALIKE * best or edit.needs_memory, edit.step_seconds

    return tuple(sorted(helping, key=rank))


def without_gain(edits: Sequence[SpeedEdit]) -> list[str]:
    """Return notes on what was tried and makes no difference."""
    return [
        f"Tried without gain ({edit.speedup:.2f} times as fast): {edit.text}"
        for edit in edits
        if edit.speedup < _HELPS
    ]


def of_host(
    trainer: Trainer, step_seconds: float, callbacks: list[keras.callbacks.Callback]
) -> Iterator[Trial]:
    """Return what takes work from the host."""
    for callback in callbacks:
        others = [other for other in callbacks if other is not callback]
        yield Trial(
            "host",
            f"Leave {names_of([callback])} out, or let it act every hundredth step.",
            functools.partial(trainer.seconds_per_step, trainer.held, callbacks=others),
            "called",
        )
    model, is_loop = trainer.model, trainer.is_loop
    if not is_loop and model.run_eagerly:
        on_jax = {"jit_compile": True} if _is_on_jax() else {}
        text = "Compile the model with `run_eagerly=False`."
        yield _held(trainer, "host", text, run_eagerly=False, **on_jax)
    elif not is_loop and _is_on_jax() and not model.jit_compile:
        yield _held(trainer, "host", "Compile the model with `jit_compile=True`.", jit_compile=True)
    elif step_seconds < _SHORT_SECONDS:
        name = "steps_per_loop" if is_loop else "steps_per_execution"
        count = _AT_ONCE * getattr(trainer.trainer, name)
        do = "Set the loop's" if is_loop else "Compile the model with"
        yield _held(trainer, "host", f"{do} `{name}={count}`.", of=trainer.trainer, **{name: count})


def _held(trainer: Trainer, part: str, text: str, of: Any = None, **settings: Any) -> Trial:
    """Try settings of the model, or of something else, on a held batch."""
    owner = trainer.model if of is None else of

    def run(seconds: float) -> float:
        with trainer.changed(owner, **settings):
            return trainer.seconds_per_step(trainer.held, seconds)

    return Trial(part, text, run, "held")


def of_input(dataset: Any, real: Callable[[Any], float]) -> Iterator[Trial]:
    """Return what makes the data come faster.

    Args:
        dataset: What is trained on.
        real: Trains on another dataset, and returns the time of a step.
    """
    if _batch.is_tf_dataset(dataset):
        from kdpkit.pipelines import _edits  # TensorFlow is there

        most = _MOST_MEMORY * (_machine.memory_bytes() or math.inf)
        for edit in _edits.edits(dataset):
            if (edit.memory_bytes or 0) <= most:
                yield _of_pipeline(edit, real)
    elif isinstance(dataset, keras.utils.PyDataset) and dataset.workers < _WORKERS:
        with_workers = copy.copy(_batch.untracked(dataset))
        with_workers.workers = _WORKERS
        text = f"Set the dataset's `workers={_WORKERS}`."
        yield Trial("waiting", text, lambda _: real(with_workers), "real")


def _of_pipeline(edit: "PipelineEdit", real: Callable[[Any], float]) -> Trial:
    make, size = functools.cache(edit.make), edit.memory_bytes
    memory = "memory for all of the data" if size is None else f"{size / 2**20:,.0f} MiB of memory"
    text = edit.text if size == 0 else f"{edit.text} It needs {memory}."
    return Trial("waiting", text, lambda _: real(make()), "real", memory=size != 0)


def of_computing(trainer: Trainer) -> Iterator[Trial]:
    """Return what makes the device compute faster."""
    if _is_on_jax() or trainer.replicas > 1:
        return
    if not trainer.is_loop:
        if not trainer.model.jit_compile:
            text = "Compile the model with `jit_compile=True`."
            yield _held(trainer, "computing", text, jit_compile=True)
        return
    steps = trainer.trainer._steps
    if not steps.jit and steps._jit != "measure":  # which tries it by itself
        yield _held(trainer, "computing", "Set the loop's `jit=True`.", of=steps, _jit=True)


def untried(trainer: Trainer) -> list[str]:
    """Return notes on what else may make a GPU compute faster, and must be tried by hand."""
    devices = keras.distribution.list_devices()  # asked for GPUs alone, JAX raises without any
    has_gpu = any(device.lower().startswith(("gpu", "cuda", "rocm")) for device in devices)
    if not has_gpu or trainer.model.dtype_policy.compute_dtype != "float32":
        return []
    policy = "`keras.config.set_dtype_policy('mixed_bfloat16')`"
    return [f"Half precision may be faster on this GPU, and was not tried: {policy}."]


def _is_on_jax() -> bool:
    return bool(keras.backend.backend() == "jax")
