"""Rules on what a TPU needs: functions from a program to findings, all in `RULES`.

A rule sees the batches of a program's data, the program of its step on JAX, and its callbacks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.callbacks import Callback, CallbackList

from kdpkit._internal import checks
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._doctor import batches, training_step
from kdpkit.diagnostics._doctor.target import Program

_GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"
_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers
_HOOKS = ("on_batch_end", "on_train_batch_end")  # those that Keras looks at
_KERAS_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


@dataclasses.dataclass(frozen=True)
class TpuProgram(Program):
    """A program whose data were looked at."""

    @functools.cached_property
    def data(self) -> dict[str, tuple[Any, batches.Batches | None]]:
        """The datasets and their batches, by name; None for a generator, which is left alone."""
        held_out_size = self.validation_batch_size
        given = {
            "train": (self.dataset, self.batch_size, "dataset"),
            "validation": (
                self.validation_data,
                self.batch_size if held_out_size is None else held_out_size,
                "validation_data",
            ),
        }
        return {
            what: (
                data,
                None if batches.is_generator(data) else batches.batches_of(data, size, name=name),
            )
            for what, (data, size, name) in given.items()
            if data is not None
        }

    @property
    def looked_at(self) -> Iterator[tuple[str, batches.Batches]]:
        """The batches of each dataset that was looked at."""
        return ((what, found) for what, (_, found) in self.data.items() if found)

    @property
    def trained(self) -> batches.Batches | None:
        """The batches that a step can compute with."""
        _, found = self.data.get("train", (None, None))
        parts = found.parts if found else ()
        is_computable = all(part.is_dense and part.dtype != "string" for part in parts)
        return found if is_computable else None

    @property
    def takes_uneven(self) -> bool:
        """Whether training takes batches of any size, as `kdpkit.training` on JAX does."""
        if self.model is None or keras.backend.backend() != "jax":
            return False
        return training_step.is_exact(self.model) or training_step.is_loop(self.model)

    @property
    def checked(self) -> tuple[str, ...]:
        """What is checked."""
        looked_at = [what for what, _ in self.looked_at]
        data = "data" if "train" in looked_at else "validation data" if looked_at else ""
        has_step = self.model is not None and self.trained and keras.backend.backend() == "jax"
        parts = {data: data, "step": has_step, "callbacks": self.has_callbacks}
        return tuple(part for part, is_checked in parts.items() if is_checked)

    @property
    def has_callbacks(self) -> bool:
        """Whether there are callbacks to look at."""
        return self.callbacks is not None and self.callbacks not in ((), [])


def _string(program: TpuProgram) -> Iterator[Finding]:
    for where, part in _parts(program):
        if part.dtype == "string":
            yield Finding(
                "string",
                "error",
                where,
                f"`{part.name}` holds text, and a TPU computes with numbers only.",
                "Look text up in the pipeline: a tokenizer, `keras.layers.StringLookup` or "
                "`tf.strings.to_hash_bucket_fast` in `Dataset.map`.",
            )


def _64_bit(program: TpuProgram) -> Iterator[Finding]:
    cost = "twice the bytes are moved, and a TPU, which has 32-bit units, computes with pairs"
    if keras.backend.backend() == "jax":
        cost = "JAX casts it to 32 bits on the host, in every step"
    for where, part in _parts(program):
        if part.dtype in ("int64", "uint64", "float64"):
            narrow = part.dtype.replace("64", "32")
            yield Finding(
                "64-bit",
                "slow",
                where,
                f"`{part.name}` is {part.dtype}: {cost}.",
                f"Cast it in the pipeline: `tf.cast(..., tf.{narrow})`, or `.astype('{narrow}')` "
                "for arrays.",
            )


def _dynamic_shape(program: TpuProgram) -> Iterator[Finding]:
    for where, part in _parts(program):
        if problem := _open_shape(part):
            yield Finding(
                "dynamic-shape",
                "error",
                where,
                f"`{part.name}` {problem}. A TPU runs a program that is compiled for fixed shapes: "
                "it raises for others, or compiles again for each of them.",
                "Use one length, with `padded_batch(size, padded_shapes=..., drop_remainder=True)` "
                "or `kdpkit.pipelines.tokenize(sequence_length=...)`. Where the pipeline's Python "
                "functions hide a shape that is fixed, declare it with `tf.ensure_shape`.",
            )


def _open_shape(part: batches.Part) -> str:
    """Return what is not fixed besides the number of examples; empty if nothing is."""
    if part.dtype == "object":
        return "holds Python objects, such as lists of different lengths"
    if not part.is_dense:
        return "is ragged or sparse"
    if part.shape is None:
        return "has an unknown number of axes"
    return f"has the shape {part.shape}" if None in part.shape[1:] else ""


def _parts(program: TpuProgram) -> Iterator[tuple[str, batches.Part]]:
    return ((f"{what}, {p.name}", p) for what, found in program.looked_at for p in found.parts)


def _dynamic_batch(program: TpuProgram) -> Iterator[Finding]:
    level, effect = "error", "A TPU's step is compiled for one size, and its cores must divide it."
    if program.takes_uneven:
        level, effect = "note", "No example is lost, but the step is compiled a second time for it."
    for what, found in program.looked_at:
        if any(part.is_dense and part.shape and part.shape[0] is None for part in found.parts):
            yield Finding(
                "dynamic-batch",
                level,
                what,
                f"The last batch may be smaller than the others. {effect}",
                "Use full batches: `batch(size, drop_remainder=True)`, or "
                'the remainder "drop" or "pad" of `PipelineConfig` or `ArrayBatches`.',
            )


def _unseen_batches(program: TpuProgram) -> Iterator[Finding]:
    for what, found in program.looked_at:
        if found.looked_at:
            yield Finding(
                "unseen-batches",
                "note",
                what,
                f"Checked was {found.looked_at}; whether others have the same shapes and types is "
                "not known.",
                "Give all batches the same shapes and types; a `tf.data.Dataset` declares them.",
            )


def _sizes(program: TpuProgram) -> Iterator[Finding]:
    replicas, full = program.replicas, program.replicas * _SUBLANES
    for what, examples in ((what, found.examples) for what, found in program.looked_at):
        nearest = f"{max(examples // full, 1) * full} or {math.ceil(examples / full) * full}"
        nearest = f"{full}" if examples <= full else nearest
        remedy = f"Use a global batch of {nearest}, a multiple of 8 examples for each core."
        size = f"{examples} examples, over {replicas} cores"
        of_replica, left = divmod(examples, replicas)
        if left:
            level = "slow" if program.takes_uneven else "error"
            problem = f"The cores do not divide a global batch: {size}."
            yield Finding("uneven-batch", level, what, problem, remedy)
        elif of_replica % _SUBLANES:
            padded = math.ceil(of_replica / _SUBLANES) * _SUBLANES
            problem = (
                f"A core gets {of_replica} of {size}, and computes on tiles of 8: "
                f"{1 - of_replica / padded:.0%} of its work is padding ({_GUIDE})."
            )
            yield Finding("tile-batch", "slow", what, problem, remedy)


def _unchecked_data(program: TpuProgram) -> Iterator[Finding]:
    for what, (_, found) in program.data.items():
        if found is None:
            yield Finding(
                "unchecked-data",
                "note",
                what,
                "It is a Python generator, which yields each batch once: a check would use one up.",
                "Use a dataset that can be iterated again, such as a `keras.utils.PyDataset` or a "
                "`tf.data.Dataset`; generators feed a TPU one batch after the other.",
            )


def _python(program: TpuProgram) -> Iterator[Finding]:
    for what, (dataset, _) in program.data.items():
        if batches.is_tf_dataset(dataset):
            from kdpkit import pipelines  # TensorFlow is there

            for finding in pipelines.lint(dataset, training=False):
                if finding.rule == "python":
                    yield dataclasses.replace(finding, where=f"{what}: {finding.where}")


def _step(program: TpuProgram) -> Iterator[Finding]:
    if program.model is None:
        return
    if program.trained is None:
        yield Finding(
            "unchecked-step",
            "note",
            "train step",
            "It was not compiled, as these data cannot reach it, or were not checked.",
            "Fix the data first, and check again.",
        )
    elif keras.backend.backend() == "jax":
        from kdpkit.diagnostics._doctor import tpu_step_jax

        yield from tpu_step_jax.findings(program.model, program.dataset, program.trained.first)


def _host_transfer(program: TpuProgram) -> Iterator[Finding]:
    for callback in _each_of(program.callbacks):
        if keras.backend.backend() == "jax" and makes_keras_wait(callback):
            yield Finding(
                "host-transfer",
                "slow",
                f"callback {type(callback).__name__}",
                "It has a hook for the end of a batch and is not `async_safe`, so Keras waits for "
                "every step and brings its logs to the host, while the TPU has nothing to do.",
                "Move the work to `on_epoch_end`; or, where the hook does not use the model and "
                "may run in another thread, set `async_safe = True` on its class. "
                "`kdpkit.callbacks` have both.",
            )


def _each_of(callbacks: Any) -> Iterator[Callback]:
    """Return callbacks one by one, also those in a `CallbackList`, without what it adds itself."""
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, CallbackList):
            yield from (each for each in callback.callbacks if not isinstance(each, _KERAS_OWN))
        elif isinstance(callback, Callback):
            yield callback
        elif callback is not None:
            checks.fail("`callbacks` must be Keras callbacks.", callback=callback)


def makes_keras_wait(callback: Callback) -> bool:
    """Return whether a callback makes Keras on JAX wait for each step, as Keras decides it.

    Keras turns the logs of every batch into Python numbers before it calls the callbacks
    (`CallbackList._on_train_batch_end` in `keras/src/callbacks/callback_list.py`), which waits for
    the step. On JAX it does so in threads of its own, while the next steps are sent ahead, unless a
    callback has a hook for the end of a batch and is not `async_safe`.
    """
    hooks = ((getattr(callback, name), getattr(Callback, name)) for name in _HOOKS)
    has_hook = any(getattr(hook, "__func__", hook) is not default for hook, default in hooks)
    return has_hook and not getattr(callback, "async_safe", False)


def _tensorflow(_: TpuProgram) -> Iterator[Finding]:
    if keras.backend.backend() == "tensorflow":
        yield Finding(
            "tensorflow",
            "note",
            "backend",
            "Keras 3 trains on TPUs through JAX; its `fit` under TensorFlow's `TPUStrategy` is not "
            "proven, and the training step is not checked for it.",
            "Set KERAS_BACKEND=jax, and check again. `tf.data` pipelines keep working.",
        )


RULES: tuple[Callable[[TpuProgram], Iterator[Finding]], ...] = (
    *(_string, _64_bit, _dynamic_shape, _dynamic_batch, _unseen_batches, _sizes),
    *(_unchecked_data, _python, _step, _host_transfer, _tensorflow),
)
