"""`check_tpu`: what in the data of a training would stop a TPU, or waste its time."""

import math
from collections.abc import Iterator
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._doctor import batches, training_step
from kdpkit.diagnostics._doctor.reports import Report

_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers
_GUIDE = "https://cloud.google.com/tpu/docs/performance-guide"


def check_tpu(
    dataset: Any,
    *,
    model: Any = None,
    replicas: int = 8,
    validation_data: Any = None,
    batch_size: int | None = None,
) -> Report:
    """Find in the data on this machine what would stop a TPU, or waste its time.

    The first batch is looked at, of a `PyDataset` the last one too. Findings are sizes that vary or
    that the cores do not divide, and types with which a TPU does not compute. The step, memory and
    speed remain open. Training goes on as if nothing had been checked, except that a
    `Dataset.shuffle` that shuffles each iteration again has counted one, and that random numbers
    are drawn that the data draw.

    Args:
        dataset: What `fit` is to train on: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain
            dataset or a PyTorch `DataLoader` of global batches, or arrays `x`, `(x, y)` or `(x, y,
            sample_weight)`.
        model: A compiled Keras model, or a `kdpkit.training.TrainingLoop`, if it is known; some
            take uneven batches.
        replicas: Cores that share a global batch; 8 on the usual TPU host.
        validation_data: As `dataset`.
        batch_size: Examples in the batches that `fit` splits arrays into; None takes 32, as Keras.

    Raises:
        ValueError: Invalid or empty data, a model that is not compiled, another backend.

    >>> from kdpkit import batches, testing
    >>> x, y = testing.toy_classification(64, features=8)
    >>> report = check_tpu(batches.ArrayBatches((x, y.astype("int64")), global_batch_size=60))
    >>> sorted(finding.rule for finding in report.findings if finding.level != "note")
    ['64-bit', 'uneven-batch']
    """
    on_jax = checks.backend("A check for TPUs", "jax", "tensorflow") == "jax"
    replicas = checks.integer("replicas", replicas)
    if model is not None:
        training_step.check_model(model)
    data = {"train": batches.batches_of(dataset, batch_size)}
    if validation_data is not None:
        data["validation"] = batches.batches_of(validation_data, batch_size, name="validation_data")
    is_ours = training_step.is_exact(model) or training_step.is_loop(model)
    found: list[Finding] = []
    for what, seen in data.items():
        for part in seen.parts:
            found += _of_part(f"{what}, {part.name}", part)
        found += _of_sizes(what, seen, replicas, takes_uneven=on_jax and is_ours)
    if not on_jax:
        problem = (
            "Keras 3 trains on TPUs through JAX; its `fit` fails under TensorFlow's `TPUStrategy` "
            "(keras-team/keras#19448)."
        )
        remedy = "Set KERAS_BACKEND=jax. `tf.data` pipelines keep working."
        found.append(Finding("tensorflow", "note", "backend", problem, remedy))
    return Report(check_results.in_order(found), tuple(data))


def _of_part(where: str, part: batches.Part) -> Iterator[Finding]:
    """Yield what is wrong with the type or the shape of an array."""
    if part.dtype == "string":
        problem = f"`{part.name}` holds text, and a TPU computes with numbers only."
        remedy = (
            "Look text up in the pipeline: a tokenizer, `keras.layers.StringLookup` or "
            "`tf.strings.to_hash_bucket_fast` in `Dataset.map`."
        )
        yield Finding("string", "error", where, problem, remedy)
    if part.dtype in ("int64", "uint64", "float64"):
        narrow = part.dtype.replace("64", "32")
        problem = f"`{part.name}` is {part.dtype}: JAX casts it to 32 bits on the host, every step."
        remedy = (
            f"Cast it in the pipeline: `tf.cast(..., tf.{narrow})`, or `.astype('{narrow}')` for "
            "arrays."
        )
        yield Finding("64-bit", "slow", where, problem, remedy)
    problem = ""
    if part.dtype == "object":
        problem = "holds Python objects, such as lists of different lengths"
    elif not part.is_dense:
        problem = "is ragged or sparse"
    elif part.shape is None or None in part.shape[1:]:
        problem = f"has the shape {part.shape or 'unknown'}"
    if problem:
        problem = (
            f"`{part.name}` {problem}. A TPU runs a program that is compiled for fixed shapes: it "
            "raises for others, or compiles again for each of them."
        )
        remedy = (
            "Use one length, with `padded_batch(size, padded_shapes=..., drop_remainder=True)` or "
            "`kdpkit.pipelines.tokenize(sequence_length=...)`. Where the pipeline's Python "
            "functions hide a shape that is fixed, declare it with `tf.ensure_shape`."
        )
        yield Finding("dynamic-shape", "error", where, problem, remedy)


def _of_sizes(
    what: str, seen: batches.Batches, replicas: int, *, takes_uneven: bool
) -> Iterator[Finding]:
    """Yield what is wrong with the sizes of batches; kdpkit on JAX takes uneven ones."""
    examples = seen.examples
    if any(part.is_dense and part.shape and part.shape[0] is None for part in seen.parts):
        level, effect = "error", "A TPU's step is compiled for one size."
        if takes_uneven:
            level, effect = "note", "No example is lost, but the step is compiled again for it."
        problem = f"The last batch may be smaller than the others. {effect}"
        remedy = (
            "Use full batches: `batch(size, drop_remainder=True)`, or the remainder "
            '"drop" or "pad" of `PipelineConfig` or `ArrayBatches`.'
        )
        yield Finding("dynamic-batch", level, what, problem, remedy)
    full = replicas * _SUBLANES
    below, above = examples // full * full, math.ceil(examples / full) * full
    nearest = f"{below} or {above}" if below else f"{above}"
    remedy = f"Use a global batch of {nearest}, a multiple of 8 examples for each core."
    of_core, left = divmod(examples, replicas)
    if left:
        problem = f"{replicas} cores do not divide a global batch of {examples} examples."
        level = "slow" if takes_uneven else "error"
        yield Finding("uneven-batch", level, what, problem, remedy)
    elif of_core % _SUBLANES:
        waste = 1 - of_core / (math.ceil(of_core / _SUBLANES) * _SUBLANES)
        problem = (
            f"A core gets {of_core} of {examples} examples, and computes on tiles of 8: "
            f"{waste:.0%} of its work is padding ({_GUIDE})."
        )
        yield Finding("tile-batch", "slow", what, problem, remedy)
