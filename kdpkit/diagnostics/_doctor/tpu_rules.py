"""Rules on what a TPU needs: functions from a program to findings, all in `RULES`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import keras

from kdpkit.diagnostics._doctor import batches, training_step

_GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"
_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers

_Found: TypeAlias = Iterator[tuple[str, str, str, str]]  # level, where, problem, remedy


@dataclasses.dataclass(frozen=True)
class TpuProgram:
    """What is known of a program: its batches, of training and validation, and what trains."""

    data: Mapping[str, batches.Batches]
    model: Any
    replicas: int

    @property
    def on_jax(self) -> bool:
        """Whether Keras trains with JAX."""
        return bool(keras.backend.backend() == "jax")

    @property
    def takes_uneven(self) -> bool:
        """Whether training takes batches of any size, as `kdpkit.training` on JAX does."""
        is_ours = training_step.is_exact(self.model) or training_step.is_loop(self.model)
        return self.on_jax and is_ours

    @property
    def parts(self) -> Iterator[tuple[str, batches.Part]]:
        """The arrays of all batches, and where they are."""
        for what, found in self.data.items():
            yield from ((f"{what}, {part.name}", part) for part in found.parts)


def _string(program: TpuProgram) -> _Found:
    for where, part in program.parts:
        if part.dtype == "string":
            yield (
                "error",
                where,
                f"`{part.name}` holds text, and a TPU computes with numbers only.",
                "Look text up in the pipeline: a tokenizer, `keras.layers.StringLookup` or "
                "`tf.strings.to_hash_bucket_fast` in `Dataset.map`.",
            )


def _64_bit(program: TpuProgram) -> _Found:
    cost = "twice the bytes are moved, and a TPU, which has 32-bit units, computes with pairs"
    if program.on_jax:
        cost = "JAX casts it to 32 bits on the host, in every step"
    for where, part in program.parts:
        if part.dtype in ("int64", "uint64", "float64"):
            narrow = part.dtype.replace("64", "32")
            yield (
                "slow",
                where,
                f"`{part.name}` is {part.dtype}: {cost}.",
                f"Cast it in the pipeline: `tf.cast(..., tf.{narrow})`, or `.astype('{narrow}')` "
                "for arrays.",
            )


def _dynamic_shape(program: TpuProgram) -> _Found:
    for where, part in program.parts:
        problem = ""
        if part.dtype == "object":
            problem = "holds Python objects, such as lists of different lengths"
        elif not part.is_dense:
            problem = "is ragged or sparse"
        elif part.shape is None or None in part.shape[1:]:
            problem = f"has the shape {part.shape or 'unknown'}"
        if problem:
            yield (
                "error",
                where,
                f"`{part.name}` {problem}. A TPU runs a program that is compiled for fixed shapes: "
                "it raises for others, or compiles again for each of them.",
                "Use one length, with `padded_batch(size, padded_shapes=..., drop_remainder=True)` "
                "or `kdpkit.pipelines.tokenize(sequence_length=...)`. Where the pipeline's Python "
                "functions hide a shape that is fixed, declare it with `tf.ensure_shape`.",
            )


def _dynamic_batch(program: TpuProgram) -> _Found:
    level, effect = "error", "A TPU's step is compiled for one size, and its cores must divide it."
    if program.takes_uneven:
        level, effect = "note", "No example is lost, but the step is compiled a second time for it."
    for what, found in program.data.items():
        if any(part.is_dense and part.shape and part.shape[0] is None for part in found.parts):
            yield (
                level,
                what,
                f"The last batch may be smaller than the others. {effect}",
                "Use full batches: `batch(size, drop_remainder=True)`, or "
                'the remainder "drop" or "pad" of `PipelineConfig` or `ArrayBatches`.',
            )


def _uneven_batch(program: TpuProgram) -> _Found:
    level = "slow" if program.takes_uneven else "error"
    for what, found in program.data.items():
        if found.examples % program.replicas:
            size = f"{found.examples} examples, over {program.replicas} cores"
            problem = f"The cores do not divide a global batch: {size}."
            yield level, what, problem, _better_size(found.examples, program.replicas)


def _tile_batch(program: TpuProgram) -> _Found:
    for what, found in program.data.items():
        of_replica, left = divmod(found.examples, program.replicas)
        if of_replica % _SUBLANES and not left:
            waste = 1 - of_replica / (math.ceil(of_replica / _SUBLANES) * _SUBLANES)
            problem = (
                f"A core gets {of_replica} of {found.examples} examples, and computes on tiles of "
                f"8: {waste:.0%} of its work is padding ({_GUIDE})."
            )
            yield "slow", what, problem, _better_size(found.examples, program.replicas)


def _better_size(examples: int, replicas: int) -> str:
    full = replicas * _SUBLANES
    below, above = examples // full * full, math.ceil(examples / full) * full
    nearest = f"{below} or {above}" if below else f"{above}"
    return f"Use a global batch of {nearest}, a multiple of 8 examples for each core."


def _tensorflow(program: TpuProgram) -> _Found:
    if not program.on_jax:
        yield (
            "note",
            "backend",
            "Keras 3 trains on TPUs through JAX; its `fit` fails under TensorFlow's `TPUStrategy` "
            "(keras-team/keras#19448).",
            "Set KERAS_BACKEND=jax, and check again. `tf.data` pipelines keep working.",
        )


RULES = {
    "string": _string,
    "64-bit": _64_bit,
    "dynamic-shape": _dynamic_shape,
    "dynamic-batch": _dynamic_batch,
    "uneven-batch": _uneven_batch,
    "tile-batch": _tile_batch,
    "tensorflow": _tensorflow,
}
