"""What the batches of a dataset mean to a TPU: their shapes, sizes and types."""

import math
from collections.abc import Iterator

import keras

from kdpkit._findings import Finding
from kdpkit.diagnostics._batch import Batches, Part
from kdpkit.diagnostics._tpu_widths import GUIDE, SUBLANES


def findings(
    batches: Batches, *, replicas: int, takes_uneven: bool, what: str
) -> Iterator[Finding]:
    """Check what a dataset gives.

    Args:
        batches: What it gives.
        replicas: Cores that share a batch.
        takes_uneven: Whether the training at hand takes batches of any size, as JAX with
            `kdpkit.training` does.
        what: Which dataset this is, such as `"validation"`.
    """
    for part in batches.parts:
        yield from _of_part(part, what)
    if any(part.is_dense and part.shape and part.shape[0] is None for part in batches.parts):
        yield _uneven(what, takes_uneven)
    if batches.looked_at:
        yield _unseen(batches.looked_at, what)
    if batches.rows:
        yield from _of_rows(batches.rows, replicas, takes_uneven, what)


def _of_part(part: Part, what: str) -> Iterator[Finding]:
    where = f"{what}, {part.name}"
    if part.dtype == "string":
        yield Finding(
            "string",
            "refused",
            where,
            f"`{part.name}` holds text, and a TPU computes with numbers alone.",
            "Look text up in the pipeline: a tokenizer, `keras.layers.StringLookup` or "
            "`tf.strings.to_hash_bucket_fast` in `Dataset.map`.",
        )
    elif part.dtype in ("int64", "uint64", "float64"):
        yield _of_64_bits(part, where)
    if part.dtype == "object":
        yield _open_shape(
            where, f"`{part.name}` holds Python objects, such as rows of different lengths."
        )
    elif not part.is_dense:
        yield _open_shape(where, f"`{part.name}` is ragged or sparse.")
    elif part.shape is None:
        yield _open_shape(where, f"The number of axes of `{part.name}` is not known.")
    elif None in part.shape[1:]:
        shape = ", ".join("None" if size is None else str(size) for size in part.shape)
        yield _open_shape(where, f"`{part.name}` has the shape ({shape}).")


def _open_shape(where: str, problem: str) -> Finding:
    return Finding(
        "dynamic-shape",
        "refused",
        where,
        f"{problem} A TPU runs a program that is compiled for fixed shapes: it refuses others, or "
        "compiles anew for each of them.",
        "Give one length, with `padded_batch(size, padded_shapes=..., drop_remainder=True)` or "
        "`kdpkit.pipelines.tokenize(sequence_length=...)`. Where the pipeline's Python functions "
        "hide a shape that is fixed, say it with `tf.ensure_shape`.",
    )


def _unseen(looked_at: str, what: str) -> Finding:
    return Finding(
        "unseen-batches",
        "note",
        what,
        f"Looked at was {looked_at}; whether others have the same shapes and types is not known.",
        "Give every batch the same; a `tf.data.Dataset` says of itself what all of its batches "
        "are.",
    )


def _uneven(what: str, takes_uneven: bool) -> Finding:
    remedy = (
        "Give full batches: `batch(size, drop_remainder=True)`, "
        '`PipelineConfig(remainder="drop")` or "pad", `ArrayBatches(remainder="drop")` or "pad".'
    )
    if takes_uneven:
        return Finding(
            "dynamic-batch",
            "note",
            what,
            "The last batch may be smaller than the others. No row is lost, but what is "
            "compiled is compiled a second time for it.",
            remedy,
        )
    return Finding(
        "dynamic-batch",
        "refused",
        what,
        "The last batch may be smaller than the others. A TPU's step is compiled for one size, and "
        "its cores must divide it.",
        remedy,
    )


def _of_rows(rows: int, replicas: int, takes_uneven: bool, what: str) -> Iterator[Finding]:
    size = f"{rows} rows, over {replicas} cores"
    whole = replicas * SUBLANES
    nearest = f"{max(rows // whole, 1) * whole} or {math.ceil(rows / whole) * whole}"
    nearest = f"{whole}" if rows <= whole else nearest
    if rows % replicas:
        yield Finding(
            "uneven-batch",
            "slow" if takes_uneven else "refused",
            what,
            f"The cores do not divide a global batch: {size}.",
            f"Use a global batch of {nearest}, a multiple of 8 rows for each core.",
        )
        return
    of_replica = rows // replicas
    padded = math.ceil(of_replica / SUBLANES) * SUBLANES
    if of_replica < padded:
        yield Finding(
            "tile-batch",
            "slow",
            what,
            f"A core gets {of_replica} of {size}, and computes on tiles of 8: "
            f"{1 - of_replica / padded:.0%} of its work on rows is padding ({GUIDE}).",
            f"Use a global batch of {nearest}, a multiple of 8 rows for each core.",
        )


def _of_64_bits(part: Part, where: str) -> Finding:
    narrow = part.dtype.replace("64", "32")
    does = (
        "JAX casts it to 32 bits on the host, in every step"
        if keras.backend.backend() == "jax"
        else "twice the bytes are moved, and a TPU, which has 32-bit units, computes with pairs"
    )
    return Finding(
        "64-bit",
        "slow",
        where,
        f"`{part.name}` is {part.dtype}: {does}.",
        f"Cast it in the pipeline: `tf.cast(..., tf.{narrow})`, or `.astype('{narrow}')` for "
        "arrays.",
    )
