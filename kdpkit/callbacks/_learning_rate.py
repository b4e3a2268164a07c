"""The learning rate that the last step applied, as opposed to the next step's.

After a step `optimizer.learning_rate` is already the rate of the *next* step. After n batches, with
K of them accumulated into each update, the last update was at batch index `i = n // K * K - 1`
(from 0) and used `schedule(i)`.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

from collections import deque
from collections.abc import Callable
from typing import Any

import keras
from keras.optimizers import Optimizer
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit._internal import checks, optimizers, processes


class AppliedRateCallback(keras.callbacks.Callback):
    """A callback that knows the rate of an epoch's last update.

    Other callbacks may set a plain rate around epochs, earlier or later in the list than this one.
    So the rate is read when the first batch of an epoch begins, which copies two numbers on the
    device and does not wait for them.
    """

    # On JAX, Keras calls batch hooks of such a callback in other threads, and does not wait for
    # each step. So the model is only used in `on_train_batch_begin` and epoch hooks.
    async_safe = True
    _rate_is_optional = False

    def __init__(self) -> None:
        super().__init__()
        self._has_rate = False
        self._epoch_start: tuple[Any, Any] | None = None  # the count of batches, and the rate
        self._ended_batches: deque[int] = deque(maxlen=64)
        self._last_update = -1  # the batch index of the last update, which the schedule got
        self._rate: float | None = None  # the rate of that update

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = optimizers.wrapped(self.model.optimizer)
        if not isinstance(optimizer, Optimizer):
            checks.fail(
                "The learning rate is read from a Keras optimizer.",
                optimizer=self.model.optimizer,
                remedy="Compile the model with one, or leave this callback out.",
            )
        return optimizer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        has_several_rates = hasattr(optimizer, "optimizers")  # a `MultiOptimizer`
        is_needed = isinstance(optimizer, Optimizer) or not self._rate_is_optional
        self._has_rate = is_needed and not has_several_rates
        if self._has_rate:
            self._last_update = self._update_before(int(self._count_batches()))
        self._rate = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_start = None
        self._ended_batches.clear()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the rate, if this is the epoch's first batch."""
        if self._has_rate and self._epoch_start is None:
            rate = self._optimizer._learning_rate  # The public name has a number, no schedule.
            if not isinstance(rate, LearningRateSchedule):
                rate = keras.ops.copy(self._optimizer.learning_rate)
            self._epoch_start = self._count_batches(), rate

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch; on JAX Keras may call this in any thread and order."""
        self._ended_batches.append(batch + 1)

    def _count_batches(self) -> Any:
        """Return the optimizer's count of batches, without those that loss scaling skipped."""
        # The public `iterations` counts updates, without the batches being accumulated. The copy
        # is one number where replicas have one each.
        return keras.ops.copy(self._optimizer._iterations)

    def _update_before(self, batches: int) -> int:
        """Return the batch index of the last update in so many batches; -1 before the first."""
        per_update = self._optimizer.gradient_accumulation_steps or 1
        return batches // per_update * per_update - 1

    def _applied_rate(self) -> float | None:
        """Return the rate of the last update; None before the first one of this training."""
        if self._epoch_start is not None:
            before, rate = self._epoch_start
            # One batch too many may have begun: docs/upstream/keras_begins_a_batch_too_many.md
            ended = int(before) + max(self._ended_batches, default=0)
            last_update = self._update_before(min(int(self._count_batches()), ended))
            if last_update != self._last_update:
                if isinstance(rate, LearningRateSchedule):
                    rate = rate(keras.ops.convert_to_tensor(last_update, dtype="int32"))
                self._last_update, self._rate = last_update, float(rate)
        return self._rate


class LearningRateLogger(AppliedRateCallback):
    """Adds the applied learning rate to the logs, as `learning_rate`.

    History, the progress line, and callbacks later in the list (`TensorBoard`, `CSVLogger`) then
    have it. At the end of an epoch it is the rate of the epoch's last update, also with schedules,
    `LossScaleOptimizer`, gradient accumulation and `steps_per_execution`. Before the first update,
    with gradient accumulation, there is no such key, and none of a `MultiOptimizer`, which has
    several rates.

    A plain rate may be set by any callback in any epoch hook; one that is set inside an epoch is
    logged as it was at the epoch's first batch.

    Raises:
        ValueError: The model has no Keras optimizer.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, end_learning_rate=0.0)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(schedule), "mse")
    >>> x = keras.ops.ones((2, 1))
    >>> history = model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=LearningRateLogger())
    >>> history.history["learning_rate"]
    [0.75, 0.25]
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rate = self._applied_rate()
        if logs is not None and rate is not None:
            logs["learning_rate"] = rate


class PrintLR(LearningRateLogger):
    """Prints, once per epoch, the learning rate of its last update, and adds it to the logs.

    The line appears after Keras' progress line is complete. `step` is the optimizer's number of
    batches up to and including that update; with a schedule the rate is `schedule(step - 1)`. The
    logs are those of `LearningRateLogger`. With several processes only the first one prints.

    Args:
        print_fn: Function that is called with each line, such as `logging.info`.
        verbose: 0 prints nothing.

    Raises:
        ValueError: The model has no Keras optimizer.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1e-4, 6, end_learning_rate=0.0)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(schedule), "mse")
    >>> x = keras.ops.ones((3, 1))
    >>> history = model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=PrintLR())
    Learning rate of epoch 1: 6.66667e-05 (step 3)
    Learning rate of epoch 2: 1.66667e-05 (step 6)
    """

    def __init__(self, print_fn: Callable[[str], Any] = print, *, verbose: int = 1) -> None:
        super().__init__()
        self.print_fn = print_fn
        self.verbose = verbose
        self._line = ""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._print()
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Format the line, to be printed after Keras' progress line."""
        super().on_epoch_end(epoch, logs)
        rate = self._applied_rate()
        if rate is not None:
            value = f"{rate:.6g} (step {self._last_update + 1})"
        elif self._has_rate:
            value = "none, `model.optimizer` has applied no update"
        else:
            value = "several, of the optimizers in `model.optimizer`"
        self._line = f"Learning rate of epoch {epoch + 1}: {value}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print()

    def _print(self) -> None:
        if self._line and self.verbose and processes.index() == 0:
            self.print_fn(self._line)
        self._line = ""
