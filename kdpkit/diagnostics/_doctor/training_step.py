"""The step with which a model or a `TrainingLoop` trains, looked at without training."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeGuard

import keras

from kdpkit._internal import checks, versions
from kdpkit.training import TrainingLoop

Trainable: TypeAlias = keras.Model | TrainingLoop


def check_model(trainer: Any) -> None:
    """Raise where it is neither a compiled model nor a `TrainingLoop`."""
    if is_loop(trainer):
        return
    if not isinstance(trainer, keras.Model):
        checks.fail(
            "`model` must be a Keras model or a `kdpkit.training.TrainingLoop`.",
            model=type(trainer).__name__,
        )
    if not trainer.compiled:
        checks.fail(
            "`model` is not compiled, so it has no training step.",
            model=trainer.name,
            remedy="Call `model.compile(optimizer, loss)` first.",
        )


def is_loop(trainer: Any) -> TypeGuard[TrainingLoop]:
    """Return whether it is a `TrainingLoop`."""
    return isinstance(trainer, TrainingLoop)


def is_exact(trainer: Any) -> bool:
    """Return whether it is a model of `replica_exact`, which has a `fit` of its own."""
    return isinstance(trainer, keras.Model) and "fit" in vars(trainer)


def model_of(trainer: Trainable) -> keras.Model:
    """Return the model that is trained."""
    return trainer.model if is_loop(trainer) else trainer


def build(model: keras.Model, first: Any) -> None:
    """Build model, optimizer and metrics as `fit` does before its first epoch, and train nothing.

    It is Keras' `fit` that is called, on TensorFlow that of `replica_exact` if there is one: a
    subclass may read its data in another way in its own, before it calls Keras', as KerasHub's
    does, and on JAX `replica_exact` calls that one.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(first)
    with history_kept(model):
        versions.build_without_training(fit_of(model), model, x, y, sample_weight)


def fit_of(model: keras.Model) -> Callable:
    """Return the `fit` that trains on batches as they are."""
    if is_exact(model) and keras.backend.backend() == "tensorflow":
        return model.fit
    return functools.partial(keras.Model.fit, model)


@contextlib.contextmanager
def history_kept(model: keras.Model) -> Iterator[None]:
    """Leave `model.history` of an earlier `fit` as it is."""
    before = vars(model).get("history")
    try:
        yield
    finally:
        if before is not None:
            model.history = before
        elif "history" in vars(model):
            del model.history
