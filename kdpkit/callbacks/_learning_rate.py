"""The learning rate that was applied, as opposed to the one that comes next.

After a step `optimizer.learning_rate` is already the rate of the *next* step. With n batches
counted and K of them accumulated into an update, the last update happened at batch index
`i = n // K * K - 1` (from 0) and used `schedule(i)`.
"""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

from collections import deque
from collections.abc import Callable
from typing import Any

import keras
from keras.optimizers import Optimizer
from keras.optimizers.schedules import LearningRateSchedule

from kdpkit._internal import checks, optimizers, processes, versions


def applied_learning_rate(optimizer: Optimizer) -> float | None:
    """Return the learning rate that the optimizer's last update used, or None before the first.

    With a schedule the result is exact at any time: `schedule(i)` of the batch index i at which the
    last update happened. Batches that gradient accumulation only collects and steps that a
    `LossScaleOptimizer` skips are no updates. A plain rate is the present value: read it before
    anything sets it for the next step. Inside `fit`, `LearningRateLogger` sees to that, and
    to the batch too many that TensorFlow counts when a dataset of unknown size ends. Every replica
    applies the same rate.

    Args:
        optimizer: A Keras optimizer, a `LossScaleOptimizer` around one included.

    Raises:
        ValueError: The optimizer is not a Keras optimizer.

    >>> optimizer = keras.optimizers.SGD(
    ...     keras.optimizers.schedules.PolynomialDecay(1.0, decay_steps=10)
    ... )
    >>> print(applied_learning_rate(optimizer))
    None
    >>> weight = keras.Variable(0.0)
    >>> for _ in range(3):
    ...     optimizer.apply([keras.ops.ones(())], [weight])
    >>> print(f"applied {applied_learning_rate(optimizer):.1f}, next {optimizer.learning_rate:.1f}")
    applied 0.8, next 0.7
    """
    inner = inner_optimizer(optimizer)
    last = _last_update(inner, batches_counted(inner))
    return None if last < 0 else _rate_at(_rate_of(inner), last)


def is_keras_optimizer(optimizer: object) -> bool:
    """Return whether the model has an optimizer to ask; a custom `train_step` may keep its own."""
    return isinstance(optimizer, Optimizer)


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Unwrap an optimizer whose rate and step count are asked for."""
    inner = optimizers.wrapped(optimizer)
    if not is_keras_optimizer(inner):
        checks.fail(
            "The learning rate is read from a Keras optimizer.",
            optimizer=optimizer,
            remedy="Compile the model with one, or leave this callback out.",
        )
    return inner


def batches_counted(optimizer: object) -> int:
    """Return the optimizer's count of batches, without those skipped; 0 for no Keras optimizer."""
    if not is_keras_optimizer(optimizer):
        return 0
    # Copied, because a number that every replica holds is no single one yet. Private, because the
    # public `iterations` counts updates, without the batches that are being accumulated.
    return int(keras.ops.copy(inner_optimizer(optimizer)._iterations))


class AppliedRateCallback(keras.callbacks.Callback):
    """A callback that knows at the end of an epoch which rate its last update used.

    Other callbacks may set a plain rate around epochs or batches, earlier or later in the list
    than this one. So the rate is looked at when a batch begins: before the first batch of an epoch,
    and again before those that can hold its last update. That is exact unless a callback *later*
    in the list sets the rate in `on_train_batch_begin`. A schedule needs no second look. A look
    copies two numbers on the device and does not wait for them.
    """

    # Nothing here makes Keras wait for every step on JAX, where it otherwise calls batch hooks in
    # threads of its own: the model is touched in `on_train_batch_begin` and in epoch hooks alone.
    async_safe = True
    _rate_is_optional = False

    def __init__(self) -> None:
        super().__init__()
        self._has_rate = False
        self._looks: list[tuple[Any, Any]] = []  # the batches counted and the rate, before a batch
        self._ended: deque[int] = deque(maxlen=64)  # batches done in this epoch, the last few ends
        self._reach = 1  # the last update lies in the last so many batches
        self._previous_batch = 0
        self._batches_at_once: int | None = None  # in a call, once a second one begins
        self._steps_per_execution = 1
        self._last_update = -1  # the batch index, as the schedule counts,
        self._rate: float | None = None  # and what it applied

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise for an optimizer whose rate cannot be known, before any training."""
        optimizer = self.model.optimizer
        self._has_rate = is_keras_optimizer(optimizer) or not self._rate_is_optional
        if self._has_rate:
            inner = inner_optimizer(optimizer)
            self._last_update = _last_update(inner, batches_counted(inner))
        self._steps_per_execution = getattr(self.model, "steps_per_execution", 1)
        self._rate = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the epoch before."""
        self._looks.clear()
        self._ended.clear()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Look at the rate, if this batch may hold the epoch's last update."""
        if batch:
            self._batches_at_once = batch - self._previous_batch
        self._previous_batch = batch
        if self._has_rate and self._should_look(batch):
            self._look()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch; on JAX Keras may call this in any thread and order."""
        self._ended.append(self._last_batch(batch) + 1)

    def _last_batch(self, batch: int) -> int:
        return versions.last_batch(batch, self._steps_per_execution)

    def _should_look(self, batch: int) -> bool:
        if not self._looks:
            return True
        _, rate = self._looks[0]
        if _is_schedule(rate) or not self._is_near_the_end(batch):
            return False
        # On JAX `self.model` fetches the complete training state, unless another callback has since
        # the last step. If none has, none can have set the rate.
        return getattr(self._model, "_jax_state_synced", True)

    def _is_near_the_end(self, batch: int) -> bool:
        steps = (self.params or {}).get("steps")
        return steps is None or steps - batch < (self._batches_at_once or 1) + self._reach

    def _look(self) -> None:
        optimizer = inner_optimizer(self.model.optimizer)
        self._reach = _accumulation(optimizer)
        counted = keras.ops.copy(optimizer._iterations)
        self._looks.append((counted, _rate_of(optimizer)))
        # The first look serves where later ones are no answer. Of those `_reach` suffice, and
        # one for the batch that Keras begins to find that a dataset of unknown size has ended.
        del self._looks[1 : -(self._reach + 1)]

    def _applied_rate(self) -> float | None:
        """Return the rate of the last update; None before the first since training began."""
        if not self._looks:
            return self._rate
        optimizer = inner_optimizer(self.model.optimizer)
        # One batch too many may have begun: docs/upstream/keras_begins_a_batch_too_many.md
        counted = min(
            batches_counted(optimizer), int(self._looks[0][0]) + max(self._ended, default=0)
        )
        last = _last_update(optimizer, counted)
        if last != self._last_update:
            _, rate = next(
                (look for look in reversed(self._looks) if int(look[0]) <= last), self._looks[0]
            )
            self._last_update, self._rate = last, _rate_at(rate, last)
        return self._rate


class LearningRateLogger(AppliedRateCallback):
    """Puts the learning rate that was applied into the logs, as `learning_rate`.

    History, the progress line, and callbacks that come later in the list (`TensorBoard`,
    `CSVLogger`) then have it. At the end of an epoch it is the rate of the epoch's last update,
    under schedules, `LossScaleOptimizer`, gradient accumulation and `steps_per_execution`. The key
    is Keras' own: `LearningRateScheduler` and `ReduceLROnPlateau` write it too. Works in `fit` on
    TensorFlow and JAX, under any strategy. While gradient accumulation has not made the first
    update there is no rate and no key.

    A plain rate may be set by any callback in any epoch hook or `on_train_batch_end`; a callback
    that sets it in `on_train_batch_begin` must come before this one.

    Args:
        every: `"epoch"` logs once an epoch, at no cost per batch (where Keras does not know the
            number of steps, a plain rate is copied each batch). `"batch"` logs each batch (each
            execution under `steps_per_execution`) too, which reads the optimizer every time and on
            JAX makes every step wait for the device.

    Raises:
        ValueError: `every` is neither, or the model has no Keras optimizer.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, end_learning_rate=0.0)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(schedule), "mse")
    >>> x = keras.ops.ones((2, 1))
    >>> history = model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=LearningRateLogger())
    >>> history.history["learning_rate"]
    [0.75, 0.25]
    """

    def __init__(self, every: str = "epoch") -> None:
        super().__init__()
        self.every = checks.one_of("every", every, ("batch", "epoch"))
        self.async_safe = every == "epoch"

    def _is_near_the_end(self, batch: int) -> bool:
        return self.every == "batch" or super()._is_near_the_end(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate of the last update up to here, if every batch is wanted."""
        super().on_train_batch_end(batch, logs)
        if self.every == "batch":
            self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate of the epoch's last update."""
        self._log(logs)

    def _log(self, logs: dict[str, Any] | None) -> None:
        rate = self._applied_rate()
        if logs is not None and rate is not None:
            logs["learning_rate"] = rate


class PrintLR(AppliedRateCallback):
    """Prints once an epoch the learning rate that its last update applied.

    The line appears when the epoch is over and Keras' progress line is complete. `step` counts the
    batches that the optimizer had seen with that update, since its first; with a schedule the rate
    is `schedule(step - 1)`. See `LearningRateLogger` for what may change the rate. Of several
    processes the first one prints.

    Args:
        print_fn: Called with each line, such as `logging.info`.
        digits: Significant digits of the rate.

    Raises:
        ValueError: `print_fn` cannot be called, `digits` is not positive, or the model has no
            Keras optimizer.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1e-4, 6, end_learning_rate=0.0)
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(schedule), "mse")
    >>> x = keras.ops.ones((3, 1))
    >>> history = model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=PrintLR())
    Learning rate of epoch 1: 6.66667e-05 (step 3)
    Learning rate of epoch 2: 1.66667e-05 (step 6)
    """

    def __init__(self, print_fn: Callable[[str], Any] = print, digits: int = 6) -> None:
        super().__init__()
        if not callable(print_fn):
            checks.fail("`print_fn` must be a function of one line of text.", print_fn=print_fn)
        self.print_fn = print_fn
        self.digits = checks.integer("digits", digits)
        self._line = ""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Print the line of the epoch before."""
        self._print()
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compose the line; it waits until Keras has ended its progress line."""
        rate = self._applied_rate()
        value = (
            "none, no update was applied yet"
            if rate is None
            else f"{rate:.{self.digits}g} (step {self._last_update + 1})"
        )
        self._line = f"Learning rate of epoch {epoch + 1}: {value}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Print the line of the last epoch."""
        self._print()

    def _print(self) -> None:
        if self._line and processes.index() == 0:
            self.print_fn(self._line)
        self._line = ""


def _rate_of(optimizer: Optimizer) -> Any:
    """Return the schedule, or a copy of the plain rate as it is now."""
    rate = optimizer._learning_rate  # `learning_rate` is a number, without its schedule
    return rate if _is_schedule(rate) else keras.ops.copy(optimizer.learning_rate)


def _rate_at(rate: Any, batch: int) -> float:
    if _is_schedule(rate):
        rate = rate(keras.ops.convert_to_tensor(batch, dtype="int32"))
    return float(rate)


def _is_schedule(rate: object) -> bool:
    return isinstance(rate, LearningRateSchedule)


def _accumulation(optimizer: Optimizer) -> int:
    return optimizer.gradient_accumulation_steps or 1


def _last_update(optimizer: Optimizer, counted: int) -> int:
    """Return the index of the batch that the last update ended with; -1 before the first."""
    every = _accumulation(optimizer)
    return counted // every * every - 1
