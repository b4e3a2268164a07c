"""How fast training really goes: steps, examples and tokens per second."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import time
from collections import deque
from typing import Any

import keras

from kdpkit._internal import checks, versions
from kdpkit.callbacks._learning_rate import batches_counted


class Throughput(keras.callbacks.Callback):
    """Measures steps, examples and tokens per second, as the device really did them.

    The clock runs from the beginning of an epoch's first batch to the moment its last result is
    there. Left out are the first execution of each `fit`, in which the step is compiled, and all
    that happens between epochs: validation, checkpoints, other callbacks. The numbers so far are
    in Keras' progress line, those of the complete epoch in History and in callbacks that come later
    in the list:

    - `steps_per_second`: batches of all replicas together, exact under `steps_per_execution`.
    - `examples_per_second`: that times `global_batch_size`; with several replicas also
      `examples_per_second_per_replica` (complete epochs only).
    - `tokens_per_second`: that times `tokens_per_example`.

    A short or padded last batch counts as a full one, so an epoch's figure is high by less than one
    batch. A first epoch of a single execution has no numbers. Where a later batch has another
    shape (a short last one), the epoch that compiles for it looks slower than the next. The time
    spent waiting for input is part of the step: on TensorFlow and JAX alike, Keras takes the next
    batch where no callback can see it.

    Args:
        global_batch_size: Examples in one batch, over all replicas; None measures steps alone.
        replicas: Replicas that a batch is split over.
        tokens_per_example: The mean number of real tokens in an example, padding not counted.

    Raises:
        ValueError: A size that is not positive, a batch that the replicas do not divide, or tokens
            without a batch size.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> speed = Throughput(4, tokens_per_example=128)
    >>> history = model.fit(x, x, batch_size=4, verbose=0, callbacks=speed)
    >>> sorted(history.history)
    ['examples_per_second', 'loss', 'steps_per_second', 'tokens_per_second']
    """

    # On JAX Keras calls the batch hooks in threads of its own, once a step's result is there, and
    # so need not wait for every step. Hence they touch no model, and only append.
    async_safe = True

    def __init__(
        self,
        global_batch_size: int | None = None,
        *,
        replicas: int = 1,
        tokens_per_example: float | None = None,
    ) -> None:
        super().__init__()
        self.replicas = checks.integer("replicas", replicas)
        self.global_batch_size = global_batch_size
        self.tokens_per_example = tokens_per_example
        if global_batch_size is not None:
            self.global_batch_size, _ = checks.global_batch(global_batch_size, replicas)
        if tokens_per_example is not None:
            self.tokens_per_example = checks.number(
                "tokens_per_example", tokens_per_example, above=0
            )
            if global_batch_size is None:
                checks.fail(
                    "Tokens per second need the number of examples in a batch.",
                    global_batch_size=global_batch_size,
                    tokens_per_example=tokens_per_example,
                    remedy="Pass `global_batch_size` too.",
                )
        self._compiled = False
        self._batches_at_once = 1
        self._start: tuple[int, float] | None = None  # the first batch on the clock, and when
        # The last few executions: the batches done after each, and when. Threads may bring them
        # in a slightly different order.
        self._ends: deque[tuple[int, float]] = deque(maxlen=64)
        self._batches_before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Expect the first execution to compile."""
        self._compiled = False
        self._batches_at_once = getattr(self.model, "steps_per_execution", 1)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock until the first batch."""
        self._start = None
        self._ends.clear()
        self._batches_before = batches_counted(self.model.optimizer)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock, unless this execution compiles."""
        if self._start is None and self._compiled:
            self._start = batch, time.perf_counter()
        self._compiled = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the time and put the speed so far into the progress line."""
        now = time.perf_counter()
        batch = versions.last_batch(batch, self._batches_at_once)
        self._ends.append((batch + 1, now))
        start = self._start  # once: on JAX the clock may start meanwhile
        if logs is not None and start is not None and batch >= start[0]:
            logs.update(self._speeds(batches_ended(batch, self.params) - start[0], now - start[1]))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the speed of the epoch."""
        if logs is None or self._start is None or not self._ends:
            return
        first, started = self._start
        steps = self._batches_done() - first
        if steps > 0:
            _, finished = max(self._ends)
            logs.update(self._speeds(steps, finished - started))
            if self.global_batch_size is not None and self.replicas > 1:
                logs["examples_per_second_per_replica"] = (
                    logs["examples_per_second"] / self.replicas
                )

    def _speeds(self, steps: int, seconds: float) -> dict[str, float]:
        speeds = {"steps_per_second": steps / seconds}
        if self.global_batch_size is not None:
            speeds["examples_per_second"] = speeds["steps_per_second"] * self.global_batch_size
            if self.tokens_per_example is not None:
                speeds["tokens_per_second"] = (
                    speeds["examples_per_second"] * self.tokens_per_example
                )
        return speeds

    def _batches_done(self) -> int:
        """Count the epoch's batches; its end may have cut the last execution of several short."""
        *before, end = sorted(end for end, _ in self._ends)
        if (self.params or {}).get("steps"):
            return batches_ended(end - 1, self.params)
        counted = batches_counted(self.model.optimizer) - self._batches_before
        # The optimizer does not count what loss scaling skips.
        return min(max(counted, before[-1] + 1 if before else 1), end)


def batches_ended(batch: int, params: dict[str, Any] | None) -> int:
    """Count the epoch's batches up to the last one of an execution.

    Under `steps_per_execution` the last index of an epoch lies beyond its end.
    """
    return min(batch + 1, (params or {}).get("steps") or batch + 1)
