"""`replica_exact`: Keras' own `fit`, made to train on several devices what one device would."""

import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

import keras

from kdpkit._internal import checks

Model = TypeVar("Model", bound=keras.Model)


def replica_exact(
    model: Model,
    *,
    batch_norm: str = "global",
    divided: Sequence[keras.layers.Layer] = (),
    undivided: Sequence[keras.layers.Layer] = (),
) -> Model:
    """Make `fit`, `evaluate` and `predict` on several devices do what they do on one device.

    Call it once, before or after `compile`, on a model that was built for several devices: on
    TensorFlow inside `with strategy.scope():`, on JAX after
    `keras.distribution.set_distribution(DataParallel())`. Then train as always. Each batch is
    shared by the devices, and weights, losses and metrics equal those of one device, except for
    rounding: for batches of any size, and for a `train_step` of your own, written as for one
    device. The model is saved and loaded as before.

    On TensorFlow the devices divide only calls of layers: of Keras' and KerasHub's layers, and of
    your own if a trial shows that they compute each example by itself. The first device computes
    everything else, and with `run_eagerly=True` everything.

    Which layers are divided, random numbers, XLA, limits: docs/explanation/what_stays_exact.md.
    Several processes: docs/how_to/several_processes.md.

    Args:
        model: A Keras model: Sequential, functional, subclassed, or a KerasHub task.
        batch_norm: `"global"` normalizes with the statistics of the complete batch, as one device
            does. `"replica"` normalizes with those of each device's examples, as stock Keras does
            on several devices, and warns once.
        divided: Layers to divide although a trial cannot show that they compute each example by
            itself.
        undivided: Layers that the first device is to compute for all examples.

    Returns:
        The same model. On TensorFlow one that was built outside any strategy trains as before; it
        raises if `kdpkit.strategies` has made one of several replicas, and no model has used any.

    Raises:
        ValueError: `model` is not a Keras model, or its strategy is one that Keras' `fit` does not
            support. On TensorFlow `fit` raises for a dataset that is empty, endless without
            `steps_per_epoch`, or not batched.

    >>> from kdpkit import strategies, testing
    >>> x, y = testing.toy_classification(10)
    >>> with strategies.select_strategy("mirrored", devices=4).scope():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> history = model.fit(x, y, batch_size=5, verbose=0)  # shards of 2, 2, 1 and 0 examples
    """
    backend = checks.backend("`replica_exact`", "tensorflow", "jax")
    if not isinstance(model, keras.Model):
        checks.fail("`model` must be a Keras model.", model=model)
    batch_norm = checks.one_of("batch_norm", batch_norm, ("global", "replica"))
    importlib.import_module(f"kdpkit.training.{backend}._fit").attach(
        model,
        batch_norm=batch_norm,
        divided=_layers("divided", divided),
        undivided=_layers("undivided", undivided),
    )
    return model


def _layers(name: str, layers: Sequence[keras.layers.Layer]) -> list[Any]:
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            checks.fail(f"`{name}` must be a list of layers.", **{name: layer})
    return [*layers]
