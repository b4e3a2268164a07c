"""`check_tpu`: what in the data of a training would stop a TPU, or waste its time."""

import math
from collections.abc import Iterator
from typing import Any

from kdpkit._internal import check_results, checks
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics._doctor import batches, training_step
from kdpkit.diagnostics._doctor.reports import Report

_SUBLANES = 8  # a TPU computes on tiles of 8 x 128 numbers


def check_tpu(
    dataset: Any,
    *,
    model: Any = None,
    replicas: int = 8,
    validation_data: Any = None,
    batch_size: int | None = None,
) -> Report:
    """Find in the data on this machine what would stop a TPU, or waste its time.

    The first batch is looked at, of a `PyDataset` the last one too: sizes that vary or that the
    cores do not divide, and types with which a TPU does not compute. Afterwards only a
    `Dataset.shuffle` that shuffles each iteration again has another order, and random numbers that
    the data draw are drawn.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a Grain dataset or a PyTorch
            `DataLoader` of global batches, or arrays `x`, `(x, y)` or `(x, y, sample_weight)`.
        model: A compiled Keras model; that of `replica_exact` takes uneven batches on JAX.
        replicas: Cores that share a global batch; 8 on the usual TPU host.
        validation_data: As `dataset`.
        batch_size: Examples in the batches that `fit` splits arrays into; None is 32, as in Keras.

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
    takes_uneven = on_jax and training_step.is_exact(model)
    findings: list[Finding] = []
    for name, seen in data.items():
        for part in seen.parts:
            findings += _of_part(f"{name}, {part.name}", part)
        findings += _of_sizes(name, seen, replicas, takes_uneven=takes_uneven)
    if not on_jax:
        problem = "Keras 3 trains on TPUs through JAX (keras-team/keras#19448)."
        remedy = "Set KERAS_BACKEND=jax. `tf.data` pipelines keep working."
        findings.append(Finding("tensorflow", "note", "backend", problem, remedy))
    return Report(check_results.in_order(findings), tuple(data))


def _of_part(where: str, part: batches.Part) -> Iterator[Finding]:
    """Yield what is wrong with the type or the shape of an array."""
    if part.dtype == "string":
        remedy = "Look text up in the pipeline, with a tokenizer or `keras.layers.StringLookup`."
        yield Finding("string", "error", where, "A TPU computes with numbers only.", remedy)
    if part.dtype in ("int64", "uint64", "float64"):
        problem = f"It is {part.dtype}: JAX casts it to 32 bits on the host, every step."
        remedy = f"Cast it to {part.dtype.replace('64', '32')} in the pipeline, or once beforehand."
        yield Finding("64-bit", "slow", where, problem, remedy)
    if part.dtype == "object" or not part.is_dense:
        problem = "It is ragged or sparse, or holds lists of different lengths."
    elif part.shape is None or None in part.shape[1:]:
        problem = f"It has the shape {part.shape or 'unknown'}."
    else:
        return
    remedy = (
        "A TPU's program is compiled for fixed shapes: use one length, with `padded_batch` or "
        "`kdpkit.pipelines.tokenize(sequence_length=...)`; declare a shape that Python functions "
        "hide with `tf.ensure_shape`."
    )
    yield Finding("dynamic-shape", "error", where, problem, remedy)


def _of_sizes(
    name: str, seen: batches.Batches, replicas: int, *, takes_uneven: bool
) -> Iterator[Finding]:
    """Yield what is wrong with the sizes of batches; kdpkit on JAX takes uneven ones."""
    if any(part.is_dense and part.shape and part.shape[0] is None for part in seen.parts):
        problem = "The last batch may be smaller than the others, and a step is compiled for each."
        remedy = "Use `batch(size, drop_remainder=True)`, or the remainder 'drop' or 'pad'."
        yield Finding("dynamic-batch", "note" if takes_uneven else "error", name, problem, remedy)
    examples, tiles = seen.examples, replicas * _SUBLANES
    if examples % tiles:
        is_even = examples % replicas == 0
        problem = f"{replicas} cores do not divide a global batch of {examples} examples."
        if is_even:
            problem = f"A core gets {examples // replicas} examples, and computes on tiles of 8."
        remedy = f"Use a multiple of {tiles}, such as {math.ceil(examples / tiles) * tiles}."
        level = "slow" if is_even or takes_uneven else "error"
        yield Finding("tile-batch" if is_even else "uneven-batch", level, name, problem, remedy)
