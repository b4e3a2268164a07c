"""What data mean to a TPU: the shapes, sizes and types of their batches."""

import math
from collections.abc import Iterator

import keras

from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._batch import Batches, Part

_GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"
_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers


def findings_on_batches(
    batches: Batches, *, replicas: int, takes_uneven: bool, what: str
) -> Iterator[Finding]:
    """Check the batches of a dataset.

    Args:
        batches: Its batches.
        replicas: Cores that share a batch.
        takes_uneven: Whether the training takes batches of any size, as JAX with
            `kdpkit.training` does.
        what: Which dataset this is, such as `"validation"`.
    """
    for part in batches.parts:
        yield from _of_part(part, f"{what}, {part.name}")
    if any(part.is_dense and part.shape and part.shape[0] is None for part in batches.parts):
        effect = (
            "No example is lost, but the step is compiled a second time for it."
            if takes_uneven
            else "A TPU's step is compiled for one size, and its cores must divide it."
        )
        yield Finding(
            "dynamic-batch",
            "note" if takes_uneven else "error",
            what,
            f"The last batch may be smaller than the others. {effect}",
            "Use full batches: `batch(size, drop_remainder=True)`, or "
            'the remainder "drop" or "pad" of `PipelineConfig` or `ArrayBatches`.',
        )
    if batches.looked_at:
        yield Finding(
            "unseen-batches",
            "note",
            what,
            f"Checked was {batches.looked_at}; whether others have the same shapes and types is "
            "not known.",
            "Give all batches the same shapes and types; a `tf.data.Dataset` declares them.",
        )
    if batches.examples:
        yield from _of_size(batches.examples, replicas, takes_uneven, what)


def _of_part(part: Part, where: str) -> Iterator[Finding]:
    if part.dtype == "string":
        yield Finding(
            "string",
            "error",
            where,
            f"`{part.name}` holds text, and a TPU computes with numbers only.",
            "Look text up in the pipeline: a tokenizer, `keras.layers.StringLookup` or "
            "`tf.strings.to_hash_bucket_fast` in `Dataset.map`.",
        )
    if part.dtype in ("int64", "uint64", "float64"):
        narrow = part.dtype.replace("64", "32")
        cost = (
            "JAX casts it to 32 bits on the host, in every step"
            if keras.backend.backend() == "jax"
            else "twice the bytes are moved, and a TPU, which has 32-bit units, computes with pairs"
        )
        yield Finding(
            "64-bit",
            "slow",
            where,
            f"`{part.name}` is {part.dtype}: {cost}.",
            f"Cast it in the pipeline: `tf.cast(..., tf.{narrow})`, or `.astype('{narrow}')` for "
            "arrays.",
        )
    if problem := _open_shape(part):
        yield Finding(
            "dynamic-shape",
            "error",
            where,
            f"`{part.name}` {problem}. A TPU runs a program that is compiled for fixed shapes: it "
            "raises for others, or compiles again for each of them.",
            "Use one length, with `padded_batch(size, padded_shapes=..., drop_remainder=True)` or "
            "`kdpkit.pipelines.tokenize(sequence_length=...)`. Where the pipeline's Python "
            "functions hide a shape that is fixed, declare it with `tf.ensure_shape`.",
        )


def _open_shape(part: Part) -> str:
    """Return what is not fixed besides the number of examples; empty if nothing is."""
    if part.dtype == "object":
        return "holds Python objects, such as lists of different lengths"
    if not part.is_dense:
        return "is ragged or sparse"
    if part.shape is None:
        return "has an unknown number of axes"
    return f"has the shape {part.shape}" if None in part.shape[1:] else ""


def _of_size(examples: int, replicas: int, takes_uneven: bool, what: str) -> Iterator[Finding]:
    full = replicas * _SUBLANES
    nearest = f"{max(examples // full, 1) * full} or {math.ceil(examples / full) * full}"
    nearest = f"{full}" if examples <= full else nearest
    remedy = f"Use a global batch of {nearest}, a multiple of 8 examples for each core."
    size = f"{examples} examples, over {replicas} cores"
    of_replica, left = divmod(examples, replicas)
    if left:
        level = "slow" if takes_uneven else "error"
        problem = f"The cores do not divide a global batch: {size}."
        yield Finding("uneven-batch", level, what, problem, remedy)
    elif of_replica % _SUBLANES:
        padded = math.ceil(of_replica / _SUBLANES) * _SUBLANES
        problem = (
            f"A core gets {of_replica} of {size}, and computes on tiles of 8: "
            f"{1 - of_replica / padded:.0%} of its work is padding ({_GUIDE})."
        )
        yield Finding("tile-batch", "slow", what, problem, remedy)
