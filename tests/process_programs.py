"""What the programs share that tests start as processes: a model, two ways to train, results."""

# ruff: noqa: ARG002, T201 Keras' hooks have arguments; it prints for the test that started it

import time

import keras
import numpy as np
from keras import layers

from kdpkit import checkpoints
from kdpkit.training import replica_exact

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(*, dropout=0.0, seed=0):
    """Build a model with batch statistics and a penalty, in the scope of its strategy."""
    keras.utils.set_random_seed(seed)
    inner = [layers.Dropout(dropout)] if dropout else []
    first = layers.Dense(8, activation="tanh", kernel_regularizer="l2", name="first")
    norm = layers.BatchNormalization(momentum=0.9, name="norm")
    stack = [keras.Input((4,)), first, norm, *inner, layers.Dense(3, name="last")]
    return keras.Sequential(stack, name="net")


class Steps(keras.callbacks.Callback):
    """Prints each step and makes it last, so that there is time to disturb it; fails at one."""

    def __init__(self, seconds=0.0, fails_at=None):
        super().__init__()
        self.seconds, self.fails_at = seconds, fails_at

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch}", flush=True)
        time.sleep(self.seconds)
        if batch == self.fails_at:
            raise ZeroDivisionError("a mistake of this process alone")


def by_fit(model, train, held_out, *, epochs, compiled=None, examples=None, **settings):
    model = replica_exact(model)
    model.compile(
        **{"optimizer": "adam", "loss": LOSS, "weighted_metrics": ["accuracy"]} | (compiled or {})
    )
    settings = {"validation_data": held_out, "epochs": epochs, "shuffle": False} | settings
    history = model.fit(train, verbose=0, **settings).history
    evaluated = model.evaluate(held_out, verbose=0, return_dict=True)
    return results(model, history, evaluated, model.predict(held_out, verbose=0)[:examples])


def by_step(model, train, *, epochs):
    import jax

    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def loss_fn(trainable, others, x, y):
        logits, others, losses = model.stateless_call(
            trainable, others, x, training=True, return_losses=True
        )
        return LOSS(y, logits) + sum(losses), others

    @replica_exact
    def step(state, x, y, key):
        trainable, others, slots = state
        x += 0.1 * jax.random.normal(key, x.shape)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, others), grads = grad_fn(trainable, others, x, y)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return loss, (trainable, others, slots)

    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state, losses = tuple([v.value for v in group] for group in groups), []
    for _ in range(epochs):
        for index in range(len(train)):
            loss, state = step(state, *train[index], jax.random.key(index))
            losses.append(float(loss))
        train.on_epoch_end()
    return {"losses": losses, "state": jax.tree.map(lambda a: np.asarray(a).tolist(), state)}


def results(model, history, evaluated, predicted):
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": np.asarray(predicted).tolist(),
        "weights": values_of(model.variables),
        "optimizer": values_of(model.optimizer.variables),
    }


def values_of(variables):
    return [value.tolist() for value in checkpoints.values_of({"all": variables}).values()]


def assert_close(found, expected, *, rtol=1e-5, atol=1e-5):
    """Compare results, of which some were JSON."""
    assert found.keys() == expected.keys()
    for name in found:
        pairs = zip(*map(keras.tree.flatten, (found[name], expected[name])), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=name)


def sentence_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
