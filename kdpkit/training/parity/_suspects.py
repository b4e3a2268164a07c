"""What replicas may compute otherwise than one device, and how to take it away."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdpkit._internal import optimizers
from kdpkit.training import _rounding
from kdpkit.training.parity._runs import GradientRecorder

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class Suspect(NamedTuple):
    """A possible cause, and how to take it away.

    Attributes:
        cause: A description of it.
        change_model: Removes it from a model; returns whether there was something to remove.
        change_batch: Returns the batch without it, for so many replicas; the same if it has none.
    """

    cause: str
    change_model: Callable[[keras.Model], bool] = lambda _: False
    change_batch: Callable[[Any, int], Any] = lambda batch, _: batch


def even(batch: Any, replicas: int) -> Any:
    """Return a batch without its last examples, so that the replicas divide it."""
    num_examples = int(tf.shape(tf.nest.flatten(batch)[0])[0])
    if num_examples % replicas == 0:
        return batch
    kept = tf.range(max(num_examples // replicas, 1) * replicas) % num_examples
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, kept), batch)


def record_gradients(model: keras.Model) -> None:
    """Have a model record the gradients that its optimizers would apply, and train nothing."""
    for name, value in [*vars(model).items()]:
        if isinstance(value, keras.optimizers.Optimizer):
            model.run_eagerly = True  # sooner than traced, for so few steps
            inner = optimizers.wrapped(value)
            settings = {setting: getattr(inner, setting) for setting in _CLIPPING}
            setattr(model, name, GradientRecorder(**settings))


def nudge_weights(model: keras.Model, batch: Any) -> None:
    """Change every weight by about its rounding, once there are weights."""
    if not model.built and type(model).call is not keras.Model.call:
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    _rounding.nudge_weights(model)


@contextlib.contextmanager
def restored_losses(model: keras.Model) -> Iterator[None]:
    """Restore the reductions of a model's losses at the end: several models may share them."""
    before = [(loss, loss.reduction) for loss in _losses(model)]
    try:
        yield
    finally:
        for loss, reduction in before:
            loss.reduction = reduction


def _set(owners: Iterable[object], attribute: str, value: object) -> bool:
    """Set an attribute of all owners that have another value; return whether there are any."""
    changed = [owner for owner in owners if getattr(owner, attribute, value) != value]
    for owner in changed:
        setattr(owner, attribute, value)
    return bool(changed)


def _stop_clipping(model: keras.Model) -> bool:
    recorders = [value for value in vars(model).values() if isinstance(value, GradientRecorder)]
    changed = [_set(recorders, setting, None) for setting in _CLIPPING]
    return any(changed)


def _synchronize_statistics(model: keras.Model) -> bool:
    layers = model._flatten_layers()
    batch_norm = (layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization))
    return _set(batch_norm, "synchronized", True)


def _stop_dropping(model: keras.Model) -> bool:
    layers = model._flatten_layers()
    return _set((layer for layer in layers if hasattr(layer, "seed_generator")), "rate", 0.0)


def _sum_losses(model: keras.Model) -> bool:
    return _set(_losses(model), "reduction", "sum")


def _losses(model: keras.Model) -> list[keras.Loss]:
    return [loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.Loss)]


CLIPPING = Suspect(
    "clipping before the reduction: each replica clips its own gradient", _stop_clipping
)
SUSPECTS = (
    CLIPPING,
    Suspect(
        "uneven batch: a replica with fewer examples counts as much as the others",
        change_batch=even,
    ),
    Suspect(
        "batch statistics: BatchNormalization normalizes by each replica's own examples",
        _synchronize_statistics,
    ),
    Suspect("random layers: replicas draw other numbers than one device", _stop_dropping),
    Suspect("the loss divides by each replica's own weights or unmasked entries", _sum_losses),
)
