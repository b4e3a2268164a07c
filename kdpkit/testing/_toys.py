"""Logical devices, toy data, tiny models, and how far two trainings are apart."""

from collections.abc import Iterable

import keras
import numpy as np

from kdpkit._internal import machine


def use_logical_cpus(count: int = 8) -> None:
    """Split the CPU into logical devices for the backend in use, before its runtime starts.

    On TensorFlow they are `CPU:0` to `CPU:{count - 1}`, on JAX `jax.devices()`, with enough threads
    for programs that use all of them.
    """
    machine.split_cpu(count, keras.backend.backend())


def off_by(weights: Iterable, expected: Iterable, start: Iterable) -> float:
    """Return the largest difference from what is expected, relative to the largest change."""
    arrays = [[*map(np.asarray, each)] for each in (weights, expected, start)]
    difference, change = (
        np.max([np.abs(a - b).max(initial=0.0) for a, b in zip(arrays[1], others, strict=True)])
        for others in (arrays[0], arrays[2])
    )
    return float(difference / change)


def toy_classification(
    examples: int, *, features: int = 4, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 features and integer labels that a linear model can learn.

    >>> x, y = toy_classification(10)
    >>> x.shape, y.shape
    ((10, 4), (10,))
    """
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, features)).astype("float32")
    weights = random.normal(size=(features, classes))
    return x, np.argmax(x @ weights, axis=1).astype("int32")


def tiny_classifier(*, features: int = 4, classes: int = 3, seed: int = 0) -> keras.Model:
    """Build a small dense classifier (logits) whose initial weights depend only on `seed`."""
    initializer = keras.initializers.GlorotUniform(seed=seed)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(8, activation="tanh", kernel_initializer=initializer),
            keras.layers.Dense(classes, kernel_initializer=initializer),
        ]
    )
