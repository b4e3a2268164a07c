"""Own steps as a column of the exactness table: a model whose `fit` is a loop of one's own."""

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from kdpkit.training import replica_exact


def trained_by_own_step(model):
    """Make a compiled model's `fit`, `evaluate` and `predict` loops over exact steps."""
    train_step, test_step, predict_step = (
        replica_exact(tf.function(step, jit_compile=model.jit_compile))
        for step in (model.train_step, model.test_step, model.predict_step)
    )

    def fit(x, y=None, *, batch_size=None, epochs=1, callbacks=(), validation_data=None, **weights):
        data = _batches(x, y, _sample_weights(y, **weights), batch_size)
        hooks = keras.callbacks.CallbackList(callbacks, add_history=True, model=model)
        hooks.on_train_begin()
        tf.config.run_functions_eagerly(model.run_eagerly)
        for epoch in range(epochs):
            model.reset_metrics()
            hooks.on_epoch_begin(epoch)
            for index, batch in enumerate(data):
                hooks.on_train_batch_begin(index)
                hooks.on_train_batch_end(index, _floats(train_step(batch)))
            logs = _floats(model.get_metrics_result())
            if validation_data:
                found = evaluate(*validation_data, batch_size=batch_size)
                logs |= {f"val_{name}": value for name, value in found.items()}
            hooks.on_epoch_end(epoch, logs)
        tf.config.run_functions_eagerly(False)
        model.optimizer.finalize_variable_values(model.trainable_variables)
        hooks.on_train_end()
        return model.history

    def evaluate(x, y, batch_size, **_):
        model.reset_metrics()
        for batch in _batches(x, y, None, batch_size):
            test_step(batch)
        return _floats(model.get_metrics_result())

    def predict(x, batch_size, **_):
        parts = [predict_step(batch) for batch in _batches(x, None, None, batch_size)]
        return np.concatenate(parts)

    model.fit, model.evaluate, model.predict = fit, evaluate, predict
    return model


def _sample_weights(y, sample_weight=None, class_weight=None, **_):
    return class_weight_to_sample_weights(y, class_weight) if class_weight else sample_weight


def _floats(logs):
    return {
        name: keras.tree.map_structure(lambda value: np.asarray(value).tolist(), value)
        for name, value in logs.items()
    }


def _batches(x, y, weights, batch_size):
    if isinstance(x, tf.data.Dataset):
        return x
    if not isinstance(x, np.ndarray | dict):  # a generator
        return [*x]
    y = tuple(y) if isinstance(y, list) else y
    parts = (x, y, weights)[: 1 + (y is not None) + (weights is not None)]
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)
