"""An epoch on one batch over and over: by `fit`, and by a bare loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

Epoch = Callable[[], object]


class Repeated(keras.utils.PyDataset):
    """The same batch, as many times as an epoch has steps."""

    def __init__(self, batch: Any, steps: int) -> None:
        super().__init__()
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._steps

    def __getitem__(self, index: int) -> Any:
        """Return the batch."""
        return self._batch


def by_fit(model: keras.Model, batch: Any, steps: int) -> Epoch:
    """Train with Keras' `fit`; it returns when the logs are on the host."""
    data = Repeated(batch, steps)
    return lambda: model.fit(data, epochs=1, shuffle=False, verbose=0)


def by_hand(model: keras.Model, optimizer: Any, loss: Any, batch: Any, steps: int) -> Epoch:
    """Train with a loop of a few lines, as the Keras guide to JAX writes it, without metrics."""
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, others: Any, x: Any, y: Any, *weights: Any) -> Any:
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        return loss(y, outputs, *weights), others

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, *parts: Any) -> Any:
        trainable, others, slots = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (value, others), gradients = gradient(trainable, others, *parts)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, others, slots), value

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = [[jax.numpy.array(variable.value) for variable in group] for group in groups]

    def epoch() -> None:
        nonlocal state
        for _ in range(steps):
            state, value = step(state, *batch)
        if not np.isfinite(float(value)):
            raise FloatingPointError("The loss is not finite.")

    return epoch
