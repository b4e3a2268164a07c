"""The learning rate that the last step applied, as opposed to the next step's.

After a step `optimizer.learning_rate` is already the rate of the *next* step. After n batches, with
K of them accumulated into each update, the last update was at batch index `i = n // K * K - 1`
(from 0) and used `schedule(i)`.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.optimizers import Optimizer

from kdpkit._internal import optimizers, processes


class _NotingStep:
    """The compiled step of `fit`, which also notes the batches that were counted and the rate.

    Other callbacks set rates in hooks just before a step and just after it, so the rate is read
    between the two. The notes stay on the device: nothing waits for the step.
    """

    def __init__(self, step: Callable, optimizer: Optimizer) -> None:
        self.step, self.optimizer = step, optimizers.wrapped(optimizer)
        self.places = {id(variable): place for place, variable in enumerate(optimizer.variables)}
        self.batch = 0  # the first one of a call
        # Of each call its first batch, the count of batches after it, and the plain rate.
        self.notes: deque[tuple[int, Any, Any]] = deque(maxlen=10_000)

    def __call__(self, *arguments: Any) -> Any:
        result = self.step(*arguments)
        self.notes.append((self.batch, *self._count_and_rate(result)))
        return result

    def _count_and_rate(self, result: Any) -> tuple[Any, Any]:
        """Return the count of batches and the plain rate, None of a schedule, as they are now."""
        both = (self.optimizer._iterations, self.optimizer._learning_rate)
        variables = [value for value in both if isinstance(value, keras.Variable)]
        if keras.backend.backend() == "jax":
            # Variables have no values during an epoch, and the next step reuses its state's memory.
            values = _jax_copies()([result[1][2][self.places[id(each)]] for each in variables])
        elif keras.backend.backend() == "tensorflow":
            values = [each.value.value() for each in variables]  # 3 times as fast as `ops.copy`
        else:
            values = [keras.ops.copy(each) for each in variables]
        return (*values, None)[:2]


@functools.cache
def _jax_copies() -> Callable:
    import jax

    return jax.jit(lambda values: [value + 0 for value in values])  # one dispatch for each step


class AppliedRateCallback(keras.callbacks.Callback):
    """A callback that knows the rate of the last update, whichever callback set it."""

    # On JAX, Keras calls batch hooks of such a callback in other threads, and does not wait for
    # each step. So they do not use `self.model`, which copies the state into the variables.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._has_rate = False
        self._notes: deque[tuple[int, Any, Any]] = deque(maxlen=1)
        self._last_update = -1  # the batch index of the last update, which the schedule got
        self._rate: float | None = None  # the rate of that update

    @property
    def _optimizer(self) -> Optimizer:
        return optimizers.wrapped(self._model.optimizer)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        is_multi = hasattr(self._model.optimizer, "optimizers")  # a `MultiOptimizer`
        self._has_rate = isinstance(self._optimizer, Optimizer) and not is_multi
        if self._has_rate:
            self._last_update = self._update_before(self._count_batches())
        self._rate = None
        getattr(self._model.train_function, "notes", self._notes).clear()  # of an earlier training

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Have the step note its rate; loops that do not call it get the one before an epoch."""
        step: Any = self._model.train_function
        if step and self._has_rate:
            if not isinstance(step, _NotingStep):
                step = self._model.train_function = _NotingStep(step, self._model.optimizer)
            self._notes, step.batch = step.notes, batch
        if batch == 0 and self._has_rate:
            rate = self._optimizer._learning_rate
            noted = keras.ops.copy(rate) if isinstance(rate, keras.Variable) else None
            self._notes.append((-1, self._count_batches(), noted))

    def _count_batches(self) -> int:
        """Return the optimizer's count of batches, without those that loss scaling skipped."""
        # The public `iterations` counts updates, without the batches being accumulated. The copy
        # is one number where replicas have one each.
        return int(keras.ops.copy(self._optimizer._iterations))

    def _update_before(self, batches: int) -> int:
        """Return the batch index of the last update in so many batches; -1 before the first."""
        per_update = self._optimizer.gradient_accumulation_steps or 1
        return batches // per_update * per_update - 1

    def _applied_rate(self) -> float | None:
        """Return the rate of the last update; None before the first one of this training."""
        if self._has_rate and self._notes:
            batch, count, _ = self._notes[-1]
            # After a call its note counts, because at the end of the data TensorFlow may count one
            # batch too many: docs/upstream/keras_begins_a_batch_too_many.py
            last_update = self._update_before(self._count_batches() if batch < 0 else int(count))
            if last_update != self._last_update:
                self._last_update, self._rate = last_update, self._rate_of(last_update, self._notes)
        return self._rate

    def _rate_of(self, update: int, notes: Sequence[tuple[int, Any, Any]]) -> float | None:
        """Return the rate of the update at a batch index, the last one in the notes."""
        optimizer, applied = self._optimizer, None
        if not isinstance(optimizer._learning_rate, keras.Variable):
            count = keras.ops.convert_to_tensor(update, dtype="int")
            with keras.StatelessScope([(optimizer._iterations, count)]):
                return float(optimizer.learning_rate)
        for _, count, rate in reversed(notes):
            if applied is not None and int(count) <= update:
                break
            applied = rate
        return None if applied is None else float(applied)


class LearningRateLogger(AppliedRateCallback):
    """Adds the applied learning rate to the logs, as `learning_rate`.

    History, the progress line, and callbacks later in the list (`TensorBoard`, `CSVLogger`) then
    have it. At the end of an epoch it is the rate of the epoch's last update, also with schedules,
    `LossScaleOptimizer`, gradient accumulation and `steps_per_execution`. Before the first update,
    with gradient accumulation, there is no such key, and none of a `MultiOptimizer`, which has
    several rates, or of what is no Keras optimizer.

    A plain rate may be set by any callback in any hook, before each batch or after it, earlier or
    later in the list. In a loop of your own one that is set inside an epoch is logged as it was at
    the epoch's first batch. Of a function
    (`learning_rate=lambda: ...`) it is what it returns at the end of the epoch.

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


class PrintLR(AppliedRateCallback):
    """Prints, once per epoch, the learning rate of its last update.

    The line appears after Keras' progress line is complete. `step` is the optimizer's number of
    batches up to and including that update; with a schedule the rate is `schedule(step - 1)`.
    `LearningRateLogger` has the same rate in the logs. With several processes only the first one
    prints.

    Args:
        print_fn: Function that is called with each line, such as `logging.info`.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1e-4, 6, end_learning_rate=0.0)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(schedule), "mse")
    >>> x = keras.ops.ones((3, 1))
    >>> history = model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=PrintLR())
    Learning rate of epoch 1: 6.66667e-05 (step 3)
    Learning rate of epoch 2: 1.66667e-05 (step 6)
    """

    def __init__(self, print_fn: Callable[[str], Any] = print) -> None:
        super().__init__()
        self.print_fn = print_fn
        self._line = ""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._print()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Format the line, to be printed after Keras' progress line."""
        rate = self._applied_rate()
        if rate is not None:
            value = f"{rate:.6g} (step {self._last_update + 1})"
        elif self._has_rate:
            value = "none, `model.optimizer` has applied no update"
        else:
            value = f"no single one, `model.optimizer` is {type(self._model.optimizer).__name__}"
        self._line = f"Learning rate of epoch {epoch + 1}: {value}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print()

    def _print(self) -> None:
        if self._line and processes.index() == 0:
            self.print_fn(self._line)
        self._line = ""
