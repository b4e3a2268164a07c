"""`replica_exact`: Keras' own `fit`, which then trains on R replicas what one device would."""

import importlib
from typing import TypeVar

import keras

from kdpkit._internal import checks

_Model = TypeVar("_Model", bound=keras.Model)

_ATTACHING = {
    "tensorflow": "kdpkit.training.tensorflow._fit",
    "jax": "kdpkit.training.jax._fit",
}


def replica_exact(model: _Model, *, verify: bool = True, batch_norm: str = "global") -> _Model:
    """Make a model's `fit`, `evaluate` and `predict` on R replicas do what one device does.

    Call it once: on TensorFlow on a model built in a strategy's scope; on JAX on one built after
    `keras.distribution.set_distribution(DataParallel())`; before or after `compile`. Then weights,
    losses and metrics equal one device's to rounding, also for batches that the replicas cannot
    divide, and for a `train_step` of your own, written as for one device. The model's class, its
    config and its saved file stay what they are.

    On TensorFlow a step is verified before its first use: a few examples go through it split over
    the replicas, and all on one. A step that treats its batch as a whole then runs on the global
    batch on every replica, and one line says so.

    What is covered, random numbers, batch statistics and verification:
    docs/explanation/what_stays_exact.md. Several processes: docs/how_to/several_processes.md.

    Args:
        model: A Keras model: Sequential, functional, subclassed, or a KerasHub task. The strategy
            is the one whose scope it was built in.
        verify: Whether to verify steps before their first use.
        batch_norm: `"global"`, or `"replica"` for stock Keras' statistics of each replica's own
            examples, which train something else than one device does, with one warning.

    Returns:
        The same model; on TensorFlow untouched if it was built outside any strategy.

    Raises:
        ValueError: There is no such model, or its strategy is none that Keras can fit with. Raised
            by `fit` on TensorFlow: a step that depends on how a batch is split, with the name of
            the loss, metric, layer or optimizer and the fix; a dataset that is empty, endless
            without `steps_per_epoch`, or not batched.

    >>> from kdpkit import strategies, testing
    >>> x, y = testing.toy_classification(10)
    >>> with strategies.select_strategy("mirrored", devices=4).scope():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> history = model.fit(x, y, batch_size=5, verbose=0)  # shards of 2, 2, 1 and 0 examples
    """
    backend = keras.backend.backend()
    if backend not in _ATTACHING:
        checks.fail("`replica_exact` works on TensorFlow and on JAX.", backend=backend)
    if not isinstance(model, keras.Model):
        checks.fail("`model` must be a Keras model.", model=model)
    verify = checks.one_of("verify", verify, (True, False))
    batch_norm = checks.one_of("batch_norm", batch_norm, ("global", "replica"))
    importlib.import_module(_ATTACHING[backend]).attach(model, verify=verify, batch_norm=batch_norm)
    return model
