"""`replica_exact`: Keras' own `fit`, which then trains on R replicas what one device would."""

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
    """Make a model's `fit`, `evaluate` and `predict` on R replicas do what one device does.

    Call it once: on TensorFlow on a model built in a strategy's scope; on JAX on one built after
    `keras.distribution.set_distribution(DataParallel())`; before or after `compile`. Then weights,
    losses and metrics equal one device's to rounding, also for batches that the replicas cannot
    divide, and for a `train_step` of your own, written as for one device. The model's class, its
    config and its saved file stay what they are.

    On TensorFlow a step is traced once, on the global batch, and does what it does on one device.
    Only calls of layers are repeated for each device, on its part of the examples: of libraries'
    layers, and of yours that compute each example by itself, which is tried. All else is computed
    on the first device, and with `run_eagerly=True` everything is.

    Which layers are divided, random numbers, XLA, limits: docs/explanation/what_stays_exact.md.
    Several processes: docs/how_to/several_processes.md.

    Args:
        model: A Keras model: Sequential, functional, subclassed, or a KerasHub task. The strategy
            is the one whose scope it was built in.
        batch_norm: `"global"`, or `"replica"` for stock Keras' statistics of each replica's own
            examples, which train something else than one device does, with one warning.
        divided: Layers that compute each example by itself, though that cannot be tried. Each
            device computes its part of what they are called on.
        undivided: Layers that do not, whatever the trial shows: the first device computes them for
            all examples.

    Returns:
        The same model; on TensorFlow untouched if it was built outside any strategy.

    Raises:
        ValueError: There is no such model, or its strategy is none that Keras can fit with. Raised
            by `fit` on TensorFlow: a dataset that is empty, endless without `steps_per_epoch`, or
            not batched.

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
