"""What data mean to a TPU: the shapes, sizes and types of batches, and Python in a pipeline."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import keras

from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._batch import Batches, Part

if TYPE_CHECKING:
    import tensorflow as tf

_GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"
_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def of_batches(
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
            "note" if takes_uneven else "refused",
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
            "Use every batch the same; a `tf.data.Dataset` declares what all of its batches are.",
        )
    if batches.examples:
        yield from _of_size(batches.examples, replicas, takes_uneven, what)


def _of_part(part: Part, where: str) -> Iterator[Finding]:
    if part.dtype == "string":
        yield Finding(
            "string",
            "refused",
            where,
            f"`{part.name}` holds text, and a TPU computes with numbers alone.",
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
            "refused",
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
        level = "slow" if takes_uneven else "refused"
        problem = f"The cores do not divide a global batch: {size}."
        yield Finding("uneven-batch", level, what, problem, remedy)
    elif of_replica % _SUBLANES:
        padded = math.ceil(of_replica / _SUBLANES) * _SUBLANES
        problem = (
            f"A core gets {of_replica} of {size}, and computes on tiles of 8: "
            f"{1 - of_replica / padded:.0%} of its work is padding ({_GUIDE})."
        )
        yield Finding("tile-batch", "slow", what, problem, remedy)


def of_pipeline(dataset: "tf.data.Dataset", what: str) -> Iterator[Finding]:
    """Look for Python functions in the graph of a pipeline, and run nothing."""
    import tensorflow as tf

    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # generators and tables are part of it
            strip_device_assignment=True,
        )
    except (tf.errors.OpError, ValueError) as error:
        reason = str(error).splitlines()[0]
        yield Finding(
            "unread-pipeline",
            "note",
            what,
            f"TensorFlow does not return this pipeline's graph ({reason}), so Python functions in "
            "it were not looked for.",
            "Look for `py_function`, `numpy_function` and `from_generator` in it.",
        )
        return
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    if any(node.op in _PYTHON_OPS for node in nodes):
        yield Finding(
            "python-op",
            "slow",
            what,
            "The pipeline calls Python (`py_function`, `numpy_function` or `from_generator`), one "
            "example after the other on the host, for which the TPU waits.",
            "Write it in TensorFlow operations, or prepare the data beforehand, in TFRecord files.",
        )
