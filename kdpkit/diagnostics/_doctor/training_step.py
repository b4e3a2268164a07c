"""The step with which a model or a `TrainingLoop` trains, looked at without training."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import keras

from kdpkit._internal import checks, versions
from kdpkit.diagnostics._doctor import batches
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
    return isinstance(trainer, TrainingLoop)


def can_be_traced(trainer: Any) -> bool:
    """Return whether it has a training step, and that of Keras or a loop."""
    if not isinstance(trainer, keras.Model):
        return is_loop(trainer)
    kind, of_keras = type(trainer), keras.Model
    has_own = kind.train_step is not of_keras.train_step or (
        kind.fit is not of_keras.fit and not hasattr(trainer, "preprocess_samples")
    )
    return trainer.compiled and not trainer.run_eagerly and not has_own


def is_exact(trainer: Any) -> bool:
    """Return whether it is a model of `replica_exact`, which has a `fit` of its own."""
    return isinstance(trainer, keras.Model) and "fit" in vars(trainer)


def model_of(trainer: Trainable) -> keras.Model:
    return trainer.model if is_loop(trainer) else trainer


def build(trainer: Trainable, first: Any) -> None:
    """Make the variables of a model or a loop as training does at its start, and train nothing."""
    if is_loop(trainer):
        steps: Any = trainer._steps
        steps.build(steps.open(batches.repeated(first), "dataset", steps=1), training=True)
        return
    model = model_of(trainer)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(first)
    versions.build_without_training(fit_of(model), model, x, y, sample_weight)
    if model.optimizer is not None and not model.optimizer.built:  # as `fit` may do later
        strategy = getattr(model, "distribute_strategy", None)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model.optimizer.build(model.trainable_variables)


def fit_of(model: keras.Model) -> Callable:
    """Return the `fit` that trains on batches as they are.

    That is Keras' own, on TensorFlow that of `replica_exact` if there is one: a subclass may read
    its data in another way before it calls Keras', as KerasHub's does, and on JAX `replica_exact`
    calls that one.
    """
    if is_exact(model) and keras.backend.backend() == "tensorflow":
        return model.fit
    return functools.partial(keras.Model.fit, model)


def num_devices(trainer: Trainable) -> int:
    """Return how many devices share a global batch."""
    strategy = getattr(model_of(trainer), "distribute_strategy", None)
    if keras.backend.backend() == "tensorflow":
        return getattr(strategy, "num_replicas_in_sync", 1)
    if is_loop(trainer):
        return trainer._steps.strategy.size
    distribution = keras.distribution.distribution()
    return 1 if distribution is None else distribution.device_mesh.devices.size
