"""`replica_exact`: Keras' own `fit`, which then trains on R replicas what one device would."""

import importlib
from typing import Any

import keras

from kdpkit import _checks

_ATTACHING = {
    "tensorflow": "kdpkit.training.tensorflow._fit",
    "jax": "kdpkit.training.jax._fit",
}


def replica_exact(model: Any, *, verify: bool = True, batch_norm: str = "global") -> Any:
    """Make a model's `fit`, `evaluate` and `predict` on R replicas do what one device does.

    Call it once: on TensorFlow on a model built in a strategy's scope, inside the scope or outside;
    on JAX on one built after `keras.distribution.set_distribution(DataParallel())`; before or after
    `compile`. Then weights, losses and metrics equal one device's to rounding: for batches that the
    replicas cannot divide (down to replicas without examples), features of any type, generators,
    clipping, gradient accumulation, moving averages of weights, loss scaling, sample weights,
    masks, every reduction of a Keras loss, many steps per execution, XLA, and a `train_step` of
    your own, written as for one device. The model's class, its config and its saved file stay what
    they are.

    Before the first step, the step is **verified** on TensorFlow: a few examples of the first batch
    go through it twice, split over the replicas and all on one. Gradients as the optimizers get
    them, logs and the variables that are assigned must agree, and all is put back. It costs one
    more trace of the step. If they do not agree, because a step treats its batch as a whole (a loss
    that compares examples, mixup, a sum, clipping by the norm of the gradient), every replica runs
    it on the whole batch and computes its share of each layer that it calls, and one line says so.
    If that does not agree either, nothing is trained, and an error names the loss, metric, layer or
    optimizer that depends on how a batch is cut, and what to write instead.

    - Random numbers of Keras (`Dropout`, noise, augmentation, `keras.random`) are drawn by
      position: a replica draws its examples' part of what one device draws for the batch. With
      `jit_compile=True` any number of replicas from two on draws the same, but one device in stock
      Keras, where XLA orders its numbers by the shape of the batch, draws others.
    - `BatchNormalization` normalizes by the global batch, `synchronized` or not.
    - A loss that gives one number for a batch (Dice, contrastive losses) is computed on the
      examples of all replicas. In a step, `kdpkit.training.gather_examples` gives these.

    On JAX one program computes the whole batch, so that there is nothing to verify. There batches
    of any size work, and `evaluate` and `predict` leave the model its weights when they fail.

    With several processes of TensorFlow (`select_strategy("multi_worker")`) give the same datasets
    of global batches in all of them: each replica takes its examples of every batch. The first one
    writes what `ModelCheckpoint`, `TensorBoard` and `CSVLogger` write; a process that is gone ends
    the others with a `ProcessLostError`.

    Args:
        model: A Keras model: Sequential, functional, subclassed, or a KerasHub task. The strategy
            is the one whose scope it was built in.
        verify: Whether to verify steps before their first use. `evaluate` and `predict` are
            verified where `fit` was not before, or where their step is your own.
        batch_norm: `"global"`, or `"replica"` for stock Keras' statistics of each replica's own
            examples, which train something else than one device does, with one warning.

    Returns:
        The same model; on TensorFlow untouched if it was built outside any strategy, for one
        device. There Keras 3.15 compiles a `ScheduleFreeAdamW` whose averages start from zeros, and
        not from the weights: call `optimizer.build(model.trainable_variables)` before `fit`.

    Raises:
        ValueError: There is no such model, or its strategy is none that Keras can fit with. Raised
            by `fit` on TensorFlow: a step that does not pass verification, a dataset that is
            empty, endless without `steps_per_epoch`, or not batched.

    >>> from kdpkit import strategies, testing
    >>> x, y = testing.toy_classification(10)
    >>> with strategies.select_strategy("mirrored", devices=4).scope():
    ...     model = replica_exact(testing.tiny_classifier())
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> history = model.fit(x, y, batch_size=5, verbose=0)  # shards of 2, 2, 1 and 0 examples
    """
    backend = keras.backend.backend()
    if backend not in _ATTACHING:
        _checks.refuse("`replica_exact` works on TensorFlow and on JAX.", backend=backend)
    if not isinstance(model, keras.Model):
        _checks.refuse("`model` must be a Keras model.", model=model)
    verify = _checks.one_of("verify", verify, (True, False))
    batch_norm = _checks.one_of("batch_norm", batch_norm, ("global", "replica"))
    importlib.import_module(_ATTACHING[backend]).attach(model, verify=verify, batch_norm=batch_norm)
    return model
