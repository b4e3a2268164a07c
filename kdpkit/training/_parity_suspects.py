"""What replicas may do otherwise than one device, and how to be rid of it.

A suspect is a cause, and what to take away of the batch and of the model so that it is gone. What
changes a model tells whether there was something to change.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit import _optimizers
from kdpkit.training._parity_runs import FLOAT32_EPSILON, GradientRecorder

_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def nothing(model: Any) -> bool:  # noqa: ARG001  # as its like
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
    _replace_optimizers(model, ("clipnorm", "global_clipnorm", "clipvalue"))


def record_unclipped(model: Any) -> None:
    _replace_optimizers(model, ())


def _replace_optimizers(model: Any, kept: tuple[str, ...]) -> None:
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            inner = _optimizers.wrapped(value)
            settings = {setting: getattr(inner, setting) for setting in kept}
            setattr(model, name, GradientRecorder(**settings))


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
    losses = [loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.Loss)]
    for loss in losses:
        loss.reduction = "sum"
    return bool(losses)


SUSPECTS: tuple[tuple[str, Callable[[Any, int], Any], Callable[[Any], bool]], ...] = (
    ("uneven batch: a replica with fewer rows counts as much as the others", even, nothing),
    (
        "batch statistics: BatchNormalization normalizes by each replica's own rows",
        _same_batch,
        _synchronize_statistics,
    ),
    ("random layers: replicas draw other numbers than one device", _same_batch, _stop_dropping),
    (
        "the loss divides by each replica's own weights or unmasked entries",
        _same_batch,
        _sum_losses,
    ),
)
