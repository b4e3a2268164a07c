"""`TrainingLoop` as a column of the exactness table: a model whose `fit` is the loop's."""

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from kdpkit.training import TrainingLoop


def trained_by_loop(model, **settings):
    """Make a compiled model's `fit`, `evaluate` and `predict` those of a `TrainingLoop`."""
    compiled = model._compile_config.config  # what the setting passed to `compile`
    names = ("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics")
    arguments = {name: compiled.get(name) for name in names}
    arguments |= {
        "steps_per_loop": compiled.get("steps_per_execution", 1),
        "jit_compile": compiled.get("jit_compile", "auto"),
    }
    loop = TrainingLoop(model, **arguments | settings)

    def fit(x, y=None, *, batch_size=None, validation_data=None, shuffle=False, **arguments):
        assert not shuffle
        weights = arguments.pop("sample_weight", None)
        class_weight = arguments.pop("class_weight", None)
        if class_weight:
            weights = class_weight_to_sample_weights(y, class_weight)
        validation = validation_data and _batches(*validation_data, None, batch_size)
        train = _batches(x, y, weights, batch_size)
        return loop.fit(train, validation, **{"epochs": 1} | arguments)

    def evaluate(x, y, batch_size, verbose, return_dict):
        assert return_dict
        return loop.evaluate(_batches(x, y, None, batch_size), verbose=verbose)

    def predict(x, batch_size, verbose):
        return loop.predict(_batches(x, None, None, batch_size), verbose=verbose)

    model.fit, model.evaluate, model.predict = fit, evaluate, predict
    return model


def _batches(x, y, weights, batch_size):
    if isinstance(x, tf.data.Dataset):
        return x
    if not isinstance(x, np.ndarray | dict):  # a generator
        first, *rest = x
        spec = keras.tree.map_structure(
            lambda part: tf.TensorSpec((None, *part.shape[1:]), part.dtype), first
        )
        return tf.data.Dataset.from_generator(lambda: [first, *rest], output_signature=spec)
    y = tuple(y) if isinstance(y, list) else y
    parts = (x, y, weights)[: 1 + (y is not None) + (weights is not None)]
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)
