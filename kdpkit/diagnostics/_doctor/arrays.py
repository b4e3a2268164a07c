"""Mistakes in the arrays that `fit` trains on, or in the first batch of another dataset."""

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from kdpkit._internal import checks
from kdpkit._internal.check_results import Finding
from kdpkit.batches._array_batches import named_leaves
from kdpkit.diagnostics._doctor import training_step

_SHORT = 0.25  # of a batch
# How names of Keras' losses begin that compare two arrays of the same shape.
_SAME_SHAPE = ("mean", "ma", "ms", "binary", "categoricalcrossentropy", "huber", "logcosh")


def of_values(name: str, batch: Any, model: Any) -> Iterator[Finding]:
    """Yield values that spoil any training, and labels that this model's loss does not take."""
    for part, leaf in named_leaves(batch):
        array = np.asarray(leaf)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            examples = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
            problem = (
                f"{len(examples):,} of {len(array):,} examples have NaN or infinite values, the "
                f"first is example {examples[0]:,}: one of them makes all weights NaN."
            )
            remedy = "Leave these examples out, or replace the values."
            yield Finding("not-finite", "wrong", f"{name}, {part}", problem, remedy)
    y = keras.utils.unpack_x_y_sample_weight(batch)[1]
    loss, outputs = getattr(model, "loss", None), getattr(model, "outputs", None) or []
    if loss is not None and len(outputs) == 1 and hasattr(y, "__array__"):
        yield from _of_labels(f"{name}, y", np.asarray(y), outputs[0].shape, loss)


def _of_labels(
    where: str, y: np.ndarray, output: tuple[int | None, ...], loss: Any
) -> Iterator[Finding]:
    """Yield labels that the loss of a model with one output does not take."""
    kind = kind_of(loss)
    most = {"sparsecategoricalcrossentropy": (output[-1] or math.inf) - 1, "binarycrossentropy": 1}
    if kind in most and y.dtype.kind in "iufb" and y.size:
        counted = y[y != getattr(loss, "ignore_class", None)]
        least, largest = (counted.min(), counted.max()) if counted.size else (0, 0)
        if least < 0 or largest > most[kind]:
            problem = (
                f"Labels run from {least} to {largest}, and the loss of this model takes 0 to "
                f"{most[kind]}: others train something else, and raise on few devices."
            )
            remedy = "Count classes from 0, and give the last layer an output for each."
            yield Finding("labels", "wrong", where, problem, remedy)
    if not (is_of_keras(loss) and kind.startswith(_SAME_SHAPE)) or y.ndim != len(output):
        return
    if any(size not in (None, other) for size, other in zip(output[1:], y.shape[1:], strict=True)):
        problem = (
            f"A label has the shape {y.shape[1:]}, and the output of the model {output[1:]}: the "
            "loss compares each number with all others, or raises."
        )
        yield Finding("labels", "wrong", where, problem, "Make the two shapes equal.")


def of_sizes(
    examples: int, batch_size: int | None, steps: int | None, model: Any, replicas: int
) -> Iterator[Finding]:
    """Yield what is wrong with the batches that `fit` cuts arrays into."""
    size = batch_size or (math.ceil(examples / steps) if steps else 32)
    complete, last = divmod(examples, size)
    is_exact = training_step.is_exact(model)
    if size % replicas:
        problem = f"{replicas} replicas do not divide a batch of {size} examples"
        problem += (
            "." if is_exact else ", and plain Keras gives those of smaller parts more weight."
        )
        remedy = f"Use `batch_size={math.ceil(size / replicas) * replicas}`"
        remedy += "." if is_exact else ", or `kdpkit.training.replica_exact(model)`."
        yield Finding("uneven-batch", "slow" if is_exact else "wrong", "train", problem, remedy)
    if last and ((replicas > 1 and not is_exact) or last <= _SHORT * size):
        problem = f"The last batch has {last} of {size} examples, and weighs as much as a full one."
        remedy = "Choose a `batch_size` that divides the examples, or leave the last ones out."
        yield Finding("short-batch", "note", "train", problem, remedy)
    if steps and steps > complete + (last > 0):
        problem = f"An epoch is to have {steps} steps, and ends after {complete + (last > 0)}."
        yield Finding("runs-out", "wrong", "train", problem, "Leave out `steps_per_epoch`.")


def of_order(data: Any, examples: int, model: Any, *, shuffle: bool) -> Iterator[Finding]:
    """Yield what the order of the examples spoils, of which the first are trained on."""
    classes = _classes_of(data, model)
    if classes is None:
        return
    is_in_order = classes[0] != classes[-1] and bool(np.all(classes[1:] >= classes[:-1]))
    held_out = {*classes[examples:].tolist()}
    if held_out - {*classes[:examples].tolist()} or (held_out and is_in_order):
        problem = (
            f"`validation_split` takes the last {len(classes) - examples:,} examples, which have "
            f"other classes than the rest: {checks.listed(sorted(held_out))}."
        )
        remedy = "Shuffle the arrays before `fit`; its `shuffle` acts after the split."
        yield Finding("split-classes", "wrong", "train, y", problem, remedy)
    if is_in_order and not shuffle:
        problem = "The examples are in the order of their classes, and `shuffle` is False."
        yield Finding("not-shuffled", "wrong", "train, y", problem, "Leave out `shuffle=False`.")


def _classes_of(data: Any, model: Any) -> np.ndarray | None:
    """Return the class of each example; None where the loss of the model compares no classes."""
    y = keras.utils.unpack_x_y_sample_weight(data)[1]
    kind = kind_of(getattr(model, "loss", None))
    if not kind.endswith("crossentropy") or not hasattr(y, "__array__"):
        return None
    y = np.asarray(y)
    y = y.argmax(axis=1) if kind.startswith("categorical") and y.ndim == 2 else y
    is_class = y.dtype.kind in "iufb" and y.size == len(y) and not np.any(y % 1)
    return y.ravel() if is_class else None


def is_of_keras(loss: Any) -> bool:
    module = "" if hasattr(loss, "__wrapped__") else getattr(loss, "__module__", "")
    return isinstance(loss, str) or module.partition(".")[0] == "keras"


def kind_of(loss: Any) -> str:
    """Return the name of a loss, whether it is a text, a function or an object."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return name.replace("_", "").lower()
