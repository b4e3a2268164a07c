"""`replica_exact`: Keras' own `fit`, which then trains on R replicas what one device would."""

import importlib
from typing import Any

import keras

from kdpkit import _checks

_ATTACHING = {
    "tensorflow": "kdpkit.training._exact_tensorflow",
    "jax": "kdpkit.training._exact_jax",
}


def replica_exact(model: Any) -> Any:
    """Make a model's `fit`, `evaluate` and `predict` on R replicas give what one device gives.

    Call it once: on TensorFlow on a model built in a strategy's scope, inside the scope or outside;
    on JAX on one built after `keras.distribution.set_distribution(DataParallel())`; before or after
    `compile`. Then the weights, losses and metrics of `fit`, `evaluate`, `predict` and the
    `..._on_batch` methods equal one device's to rounding: for batches that the replicas cannot
    divide (down to replicas without rows), features of any type, Python generators, clipping,
    gradient accumulation, moving averages of weights, loss scaling, sample weights, masks, every
    reduction of a Keras loss, and many steps per execution. The model's class, its config and its
    saved file stay what they are.

    On JAX one program computes the whole batch, so that there is no difference between one device
    and many, in dropout and batch statistics either. What is mended there: batches of any size, and
    `evaluate` and `predict` leave the model its weights when they fail, also on one device.

    What one device and R replicas do differently by nature on TensorFlow:

    - Dropout and other random layers draw other numbers on each replica, reproducible from the
      seed; replica 0 draws what one device would.
    - BatchNormalization normalizes by each replica's rows, which a warning tells once, unless it
      is `synchronized=True`, which is exact. Replicas keep equal moving statistics.
    - A row's loss must depend on that row alone; the state of a metric, and what a layer assigns
      to its own variables, must be a sum or a mean over rows.
    - A scalar from `add_loss`, or in the logs of a `train_step` of your own, counts as a mean over
      the rows, or as independent of them.

    With several processes of TensorFlow (`select_strategy("multi_worker")`) give the same datasets
    of global batches in all of them: each replica takes its rows of every batch. Data that differ
    are refused in all processes. The first one writes what `ModelCheckpoint`, `TensorBoard` and
    `CSVLogger` write; a process that is gone ends the others with a `ProcessLostError`.

    A `train_step` or `compute_loss` of your own is written as for one device, without dividing by
    the number of replicas. Its loss comes from `self.compute_loss` or Keras losses, and its
    gradients go to optimizers held by attributes of the model.

    Args:
        model: A Keras model: Sequential, functional, subclassed, or a KerasHub task. The strategy
            is the one whose scope it was built in.

    Returns:
        The same model; on TensorFlow untouched if it was built outside any strategy, for one
        device. There Keras 3.15 compiles a `ScheduleFreeAdamW` whose averages start from zeros, and
        not from the weights: call `optimizer.build(model.trainable_variables)` before `fit`.

    Raises:
        ValueError: There is no such model or its strategy is none that Keras can fit with. Raised
            by `fit` on TensorFlow: `jit_compile=True`, a loss that gives one number for the whole
            batch, or a `train_step` that goes around Keras' losses or the model's optimizers.

    >>> from kdpkit import strategies, testing
    >>> x, y = testing.toy_classification(10)
    >>> with strategies.select_strategy("mirrored", devices=4).scope():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> history = model.fit(x, y, batch_size=5, verbose=0)  # pieces of 2, 2, 1 and 0 rows
    """
    backend = keras.backend.backend()
    if backend not in _ATTACHING:
        _checks.refuse("`replica_exact` works on TensorFlow and on JAX.", backend=backend)
    if not isinstance(model, keras.Model):
        _checks.refuse("`model` must be a Keras model.", model=model)
    importlib.import_module(_ATTACHING[backend]).attach(model)
    return model
