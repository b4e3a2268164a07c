"""Measure training speed: steps, examples and tokens per second."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import time
from collections import deque
from typing import Any

import keras

from kdpkit._internal import checks


class Throughput(keras.callbacks.Callback):
    """Measures steps, examples and tokens per second, as completed on the device.

    The clock runs from the beginning of an epoch, before its first batch is there, until its last
    result is available. What follows is excluded: validation, checkpoints, other callbacks. In the
    first epoch of a `fit` the clock starts after the first execution, which compiles the step. The
    logs of each epoch get:

    - `steps_per_second`: batches of all replicas together, exact under `steps_per_execution`.
    - `examples_per_second`: that times `global_batch_size`.
    - `tokens_per_second`: that times `tokens_per_example`.

    A short or padded last batch counts as a full one, so an epoch's figure is too high by less than
    one batch; of a dataset of unknown size, by less than an execution. A first epoch with a single
    execution has no numbers. An epoch that compiles the step again, for a batch of another shape,
    appears slower. Waiting for input is part of the step.

    Args:
        global_batch_size: Examples in one batch, over all replicas; None only measures steps.
        tokens_per_example: The mean number of real tokens in an example, padding not counted.

    Raises:
        ValueError: A size that is not positive, or tokens without a batch size.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> speed = Throughput(4, tokens_per_example=128)
    >>> history = model.fit(x, x, batch_size=4, verbose=0, callbacks=speed)
    >>> sorted(history.history)
    ['examples_per_second', 'loss', 'steps_per_second', 'tokens_per_second']
    """

    # On JAX, Keras calls the batch hooks of such a callback in other threads, once a step's result
    # is available, and does not wait for it. So they do not use the model, and only append.
    async_safe = True

    def __init__(
        self, global_batch_size: int | None = None, *, tokens_per_example: float | None = None
    ) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.tokens_per_example = tokens_per_example
        if tokens_per_example is not None:
            checks.number("tokens_per_example", tokens_per_example, above=0)
        if global_batch_size is not None or tokens_per_example is not None:
            checks.integer("global_batch_size", global_batch_size)
        self._compiled = False
        self._start: tuple[int, float] | None = None  # the first measured batch, and the time
        # The batches done after each of the last executions, and the time. Threads may append them
        # in another order.
        self._ends: deque[tuple[int, float]] = deque(maxlen=64)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._compiled = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._start = (0, time.perf_counter()) if self._compiled else None
        self._ends.clear()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._start is None and self._compiled:
            self._start = batch, time.perf_counter()
        self._compiled = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._ends.append((batch + 1, time.perf_counter()))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or self._start is None or not self._ends:
            return
        first, started = self._start
        done, finished = max(self._ends)
        # With `steps_per_execution` the last index can be beyond the end of the epoch.
        steps = min(done, (self.params or {}).get("steps") or done) - first
        if steps <= 0:
            return
        rate = logs["steps_per_second"] = steps / (finished - started)
        if self.global_batch_size is not None:
            logs["examples_per_second"] = rate * self.global_batch_size
            if self.tokens_per_example is not None:
                logs["tokens_per_second"] = logs["examples_per_second"] * self.tokens_per_example
