"""The step with which a model trains, looked at without training."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from kdpkit._internal import checks, versions


def check_model(model: Any) -> None:
    """Raise where it is no compiled model."""
    if not isinstance(model, keras.Model):
        checks.fail("`model` must be a Keras model.", model=type(model).__name__)
    if not model.compiled:
        checks.fail(
            "`model` is not compiled, so it has no training step.",
            model=model.name,
            remedy="Call `model.compile(optimizer, loss)` first.",
        )


def can_be_traced(model: Any) -> bool:
    """Return whether it has a training step, and that of Keras."""
    kind, of_keras = type(model), keras.Model
    if not isinstance(model, of_keras):
        return False
    has_own = kind.train_step is not of_keras.train_step or (
        kind.fit is not of_keras.fit and not hasattr(model, "preprocess_samples")
    )
    return model.compiled and not model.run_eagerly and not has_own


def is_exact(model: Any) -> bool:
    """Return whether it is a model of `replica_exact`, which has a `fit` of its own."""
    return isinstance(model, keras.Model) and "fit" in vars(model)


def build(model: keras.Model, first: Any) -> None:
    """Make the variables of a model as training does at its start, and train nothing."""
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


def num_devices(model: keras.Model) -> int:
    """Return how many devices share a global batch."""
    strategy = getattr(model, "distribute_strategy", None)
    if keras.backend.backend() == "tensorflow":
        return getattr(strategy, "num_replicas_in_sync", 1)
    distribution = keras.distribution.distribution()
    return 1 if distribution is None else distribution.device_mesh.devices.size
