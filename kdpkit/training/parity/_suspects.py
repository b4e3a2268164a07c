"""What replicas may do otherwise than one device, and how to be rid of it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _optimizers
from kdpkit.training.parity._runs import FLOAT32_EPSILON, GradientRecorder

_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class Suspect(NamedTuple):
    """A possible cause, and how to take it away.

    Attributes:
        cause: It in words.
        change_batch: Gives the batch without it, for so many replicas; the same if it has none.
        change_model: Takes it from a model; tells whether there was something to take.
    """

    cause: str
    change_batch: Callable[[Any, int], Any]
    change_model: Callable[[Any], bool]


def _nothing(model: Any) -> bool:  # noqa: ARG001  # as its like
    return False


def _same_batch(batch: Any, replicas: int) -> Any:  # noqa: ARG001  # as its like
    return batch


def even(batch: Any, replicas: int) -> Any:
    rows = int(tf.shape(tf.nest.flatten(batch)[0])[0])
    if rows % replicas == 0:
        return batch
    kept = max(rows // replicas, 1) * replicas
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, tf.range(kept) % rows), batch)


def record_gradients(model: Any) -> None:
    """Have a model record the gradients that its optimizers would apply, and train nothing."""
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            model.run_eagerly = True  # sooner than traced, for so few steps
            inner = _optimizers.wrapped(value)
            settings = {setting: getattr(inner, setting) for setting in _CLIPPING}
            setattr(model, name, GradientRecorder(**settings))


_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def _stop_clipping(model: Any) -> bool:
    clipped = [
        (recorder, setting)
        for recorder in vars(model).values()
        if isinstance(recorder, GradientRecorder)
        for setting in _CLIPPING
        if getattr(recorder, setting) is not None
    ]
    for recorder, setting in clipped:
        setattr(recorder, setting, None)
    return bool(clipped)


def nudge_weights(model: Any, batch: Any) -> None:
    """Change every weight by about the rounding of the type that the model computes in."""
    if not model.built and type(model).call is not keras.Model.call:
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    epsilon = max(
        _EPSILONS.get(layer.compute_dtype, FLOAT32_EPSILON) for layer in model._flatten_layers()
    )
    random = np.random.default_rng(0)
    for weight in model.trainable_weights:
        value = np.asarray(weight.numpy())
        size = np.max(np.abs(value), initial=0.0) or 1.0
        nudge = epsilon * float(size) * random.standard_normal(value.shape)
        weight.assign((value + nudge).astype(value.dtype))


def _synchronize_statistics(model: Any) -> bool:
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    for layer in layers:
        layer.synchronized = True
    return bool(layers)


def _stop_dropping(model: Any) -> bool:
    layers = [
        layer
        for layer in model._flatten_layers()
        if hasattr(layer, "seed_generator") and hasattr(layer, "rate")
    ]
    for layer in layers:
        layer.rate = 0.0
    return bool(layers)


def _sum_losses(model: Any) -> bool:
    for loss in _losses(model):
        loss.reduction = "sum"
    return bool(_losses(model))


def _losses(model: Any) -> list[Any]:
    return [loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.Loss)]


@contextlib.contextmanager
def lent_losses(model: Any) -> Iterator[None]:
    """Give a model's losses their reductions back: all models that are built may share them."""
    before = [(loss, loss.reduction) for loss in _losses(model)]
    try:
        yield
    finally:
        for loss, reduction in before:
            loss.reduction = reduction


CLIPPING = Suspect(
    "clipping before the reduction: each replica clips its own gradient",
    _same_batch,
    _stop_clipping,
)
SUSPECTS = (
    CLIPPING,
    Suspect("uneven batch: a replica with fewer rows counts as much as the others", even, _nothing),
    Suspect(
        "batch statistics: BatchNormalization normalizes by each replica's own rows",
        _same_batch,
        _synchronize_statistics,
    ),
    Suspect(
        "random layers: replicas draw other numbers than one device", _same_batch, _stop_dropping
    ),
    Suspect(
        "the loss divides by each replica's own weights or unmasked entries",
        _same_batch,
        _sum_losses,
    ),
)
