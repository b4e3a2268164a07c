"""Own steps as a column of the exactness table: a model whose `fit` is a loop of one's own."""

import contextlib

import jax
import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from kdpkit.training import replica_exact

ON_JAX = keras.backend.backend() == "jax"


def trained_by_own_step(model):
    """Make the methods of a compiled model, such as `fit`, loops over exact steps."""
    train_step, test_step, predict_step = (_on_jax if ON_JAX else _on_tensorflow)(model)

    def fit(x, y=None, *, epochs=1, callbacks=(), validation_data=None, **settings):
        data = _adapter(x, y, **settings)
        counts = {"epochs": epochs, "steps": data.num_batches}
        hooks = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, **counts)
        hooks.on_train_begin()
        for epoch in range(getattr(model, "_initial_epoch", None) or 0, epochs):
            model.reset_metrics()
            hooks.on_epoch_begin(epoch)
            with _as_compiled(model):
                for index, batch in enumerate(_batches(data)):
                    hooks.on_train_batch_begin(index)
                    hooks.on_train_batch_end(index, _floats(train_step(batch)))
            data.on_epoch_end()
            logs = _floats(model.get_metrics_result())
            if validation_data:
                x_test, y_test, _ = keras.utils.unpack_x_y_sample_weight(validation_data)
                found = evaluate(x_test, y_test, **settings)
                logs |= {f"val_{name}": value for name, value in found.items()}
            hooks.on_epoch_end(epoch, logs)
        model.optimizer.finalize_variable_values(model.trainable_variables)
        hooks.on_train_end()
        return model.history

    def evaluate(x, y=None, **settings):
        model.reset_metrics()
        for batch in _batches(_adapter(x, y, **settings)):
            test_step(batch)
        return _floats(model.get_metrics_result())

    def predict(x, **settings):
        return np.concatenate([predict_step(batch) for batch in _batches(_adapter(x, **settings))])

    def on_batch(step):
        def once(x, y, **_):
            model.reset_metrics()
            return _floats(step((x, y)))

        return once

    model.fit, model.evaluate, model.predict = fit, evaluate, predict
    model.train_on_batch, model.test_on_batch = on_batch(train_step), on_batch(test_step)
    model.predict_on_batch = lambda x: predict_step((x,))
    return model


def _on_tensorflow(model):
    # A step that is traced finds its strategy, by the variables that it uses.
    exact = replica_exact(strategy=model.distribute_strategy if model.run_eagerly else None)
    steps = model.train_step, model.test_step, model.predict_step
    return [exact(tf.function(step, jit_compile=model.jit_compile)) for step in steps]


def _on_jax(model):
    """Return functions of a batch, whose steps are Keras' functions of a state and a batch."""

    def on_variables(step, groups):
        step = replica_exact(step)

        def run(batch):
            model._symbolic_build(data_batch=batch)  # metrics and the optimizer, as `fit` does
            variables = groups()
            outputs, state = step([[v.value for v in group] for group in variables], batch)
            for variable, value in zip(*map(keras.tree.flatten, (variables, state)), strict=True):
                variable.assign(value)
            return outputs

        return run

    def predict_step(state, batch):
        outputs, others = model.predict_step(state, batch)
        return outputs, [state[0], others]

    def evaluated():
        return [model.trainable_variables, model.non_trainable_variables, model.metrics_variables]

    def trained():
        return [*evaluated()[:2], model.optimizer.variables, model.metrics_variables]

    return [
        on_variables(model.train_step, trained),
        on_variables(model.test_step, evaluated),
        on_variables(predict_step, lambda: evaluated()[:2]),
    ]


def _adapter(*arrays, sample_weight=None, class_weight=None, batch_size=None, **_):
    return get_data_adapter(
        *arrays, sample_weight=sample_weight, class_weight=class_weight, batch_size=batch_size
    )


def _batches(adapter):
    return adapter.get_jax_iterator() if ON_JAX else adapter.get_tf_dataset()


@contextlib.contextmanager
def _as_compiled(model):
    """Run steps eagerly while a model that was compiled so is trained."""
    if ON_JAX:
        with jax.disable_jit(model.run_eagerly):
            yield
        return
    tf.config.run_functions_eagerly(model.run_eagerly)
    yield
    tf.config.run_functions_eagerly(False)


def _floats(logs):
    return {
        name: keras.tree.map_structure(lambda value: np.asarray(value).tolist(), value)
        for name, value in logs.items()
    }
