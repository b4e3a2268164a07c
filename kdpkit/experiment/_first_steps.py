"""The first steps of a run, on one device and on its replicas."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kdpkit.experiment import _strategy

_STEPS = 3
_TINY = 1e-300


def compared(
    model: keras.Model,
    build: Callable[[], keras.Model],
    train: Any,
    strategy: _strategy.Strategy,
) -> str:
    """Train copies of a model for a few steps, and return a sentence with their losses.

    Args:
        model: The model, from whose weights both copies begin.
        build: Returns another one, compiled.
        train: Batches, of which the first ones of an epoch are used; the epoch does not end.
        strategy: Where the second copy is trained.
    """
    # An epoch is over once its last batch is taken.
    batches = list(itertools.islice(iter(train), min(_STEPS, len(train) - 1)))
    if not batches:
        return ""
    batches = keras.tree.map_structure(np.asarray, batches)
    start = list(map(_value, _variables(model)))
    with _one_device():
        losses, weights = _trained(build, start, batches)
    with strategy.scope():
        other_losses, other_weights = _trained(build, start, batches)
    change = max(_distance(weights, start[: len(weights)]), _TINY)  # a warmup may begin at zero
    off = _distance(other_weights, weights) / change
    return (
        f"The first {len(batches)} steps have the losses {other_losses} on "
        f"{strategy.num_replicas_in_sync} replicas,\nand {losses} on one device; all weights "
        f"together differ by {off:.0e}\nof what these steps have changed."
    )


@contextlib.contextmanager
def _one_device() -> Iterator[None]:
    distribution = keras.distribution.distribution()  # of JAX; strategies of TensorFlow are scopes
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


def _trained(
    build: Callable[[], keras.Model], start: list[np.ndarray], batches: list[Any]
) -> tuple[str, list[np.ndarray]]:
    """Return the losses of a new model in each step, and its trained weights after them."""
    model, losses = build(), []
    model.steps_per_execution = 1  # a batch is one step
    for variable, value in zip(_variables(model), start, strict=True):
        variable.assign(value)
    for batch in batches:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        model.reset_metrics()  # The loss is a mean since then.
        logs = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        losses.append(f"{float(logs['loss']):.5f}")
    return ", ".join(losses), list(map(_value, model.trainable_variables))


def _distance(values: list[np.ndarray], others: list[np.ndarray]) -> float:
    differences = (a.astype("float64") - b for a, b in zip(values, others, strict=True))
    return float(np.sqrt(sum(np.sum(np.square(difference)) for difference in differences)))


def _variables(model: keras.Model) -> list[Any]:
    """Return the trained variables, then the others, with the states of random layers."""
    return [*model.trainable_variables, *model.non_trainable_variables]


def _value(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
