"""Training for a moment, so that a step's time is known and nothing is changed by it."""

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras

from kdpkit import checkpoints
from kdpkit._internal import versions
from kdpkit.diagnostics import _batch, _training_step
from kdpkit.diagnostics._training_step import Trainable

_WARM_UP = 2  # executions, after which everything is compiled and buffers have begun to fill
_LEAST = 3  # executions that are timed, however long they take
_ENDLESS = 10**9  # epochs, or steps: a clock ends them
_ROUNDS = 4  # of all runs, after one that warms up
_BATCHES_OF_SAME = 1000  # in an epoch of one batch that is given again and again

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], float]


class Clock(keras.callbacks.Callback):
    """Times steps, and stops training when there are enough of them.

    On JAX Keras calls it from threads of its own, when a step's result is there.

    Args:
        seconds: How long to time.
    """

    async_safe = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._ends: list[tuple[int, float]] = []  # steps done after each execution, and when
        self._before = 0

    def set_model(self, model: Any) -> None:
        """Keep the model; `self.model` would wait for every step of JAX."""
        self._trained = model

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Continue the count of steps."""
        del epoch, logs
        self._before = max(self._ends, default=(0, 0.0))[0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time, and stop if it is enough."""
        del logs
        now = time.perf_counter()
        last = versions.last_batch(batch, self._trained.steps_per_execution)
        self._ends.append((self._before + last + 1, now))
        timed = self._ends[_WARM_UP - 1 :]
        if len(timed) > _LEAST and now - timed[0][1] >= self._seconds:
            self._trained.stop_training = True

    @property
    def seconds_per_step(self) -> float:
        """The mean over what came after the warm-up."""
        (first, started), *_, (last, ended) = sorted(self._ends)[_WARM_UP - 1 :]
        return (ended - started) / (last - first)


class Trainer:
    """A model or a loop that trains for a moment.

    Args:
        trainer: A compiled model, or a `TrainingLoop`.
        first: A batch.
        batch_size: Of batches that `fit` cuts arrays into.
    """

    def __init__(self, trainer: Trainable, first: Any, batch_size: int | None = None) -> None:
        self.trainer: Any = trainer
        self.model = _training_step.model_of(trainer)
        self.is_loop = _training_step.is_loop(trainer)
        self._strategy = getattr(self.model, "distribute_strategy", None)
        self._batch_size = batch_size
        self._compiled: dict[Any, Any] = {}
        self.held = _held(first)
        if self.is_loop:
            steps = self.trainer._steps
            steps.build(steps.open(self.held, "dataset", steps=1), training=True)
        else:
            _training_step.build(self.model, first)
            self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Make the optimizer's variables, which `fit` may only make in its first step."""
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            with self._strategy.scope() if self._strategy else contextlib.nullcontext():
                optimizer.build(self.model.trainable_variables)

    @property
    def replicas(self) -> int:
        """Replicas that share a batch, on TensorFlow."""
        return int(getattr(self._strategy, "num_replicas_in_sync", 1))

    def seconds_per_step(
        self, data: Any, seconds: float, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> float:
        """Train, and return the mean time of a step."""
        clock = Clock(seconds)
        arguments = _endless(data, self._batch_size)
        if self.is_loop:
            arguments["train"] = arguments.pop("x")
        elif _batch.is_tf_dataset(data):
            arguments["shuffle"] = False  # Keras cannot, and would warn
        fit = self.trainer.fit if self.is_loop else _training_step.fit_of(self.model)
        with _training_step.history_kept(self.model), self._arrays_kept():
            fit(**arguments, callbacks=[*map(copy.copy, callbacks), clock], verbose=0)
        if data is not self.held:
            # Its iterator would read on into the next run. And if a thread of tf.data collects it
            # later, it may wait there for its own end.
            del arguments
            gc.collect()
        return clock.seconds_per_step

    def _arrays_kept(self) -> contextlib.AbstractContextManager[None]:
        """Keep plain Keras on several replicas from writing into arrays of the user's."""
        if self.replicas == 1 or self.is_loop or _training_step.is_exact(self.model):
            return contextlib.nullcontext()
        from kdpkit._internal.private_copies import private_batches  # TensorFlow is there

        return private_batches(self._strategy)

    @contextlib.contextmanager
    def changed(self, owner: Any, **settings: Any) -> Iterator[None]:
        """Change settings of a model or a loop for a while, with a compiled step of their own."""
        key = tuple(settings.items())
        of_step = self.model.train_function
        before = {name: getattr(owner, name) for name in settings}
        self.model.train_function = self._compiled.get(key)
        for name, value in settings.items():
            setattr(owner, name, value)
        try:
            yield
        finally:
            self._compiled[key] = self.model.train_function
            for name, value in before.items():
                setattr(owner, name, value)
            self.model.train_function = of_step

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the model to what it was, whatever happens meanwhile."""
        model = self.model
        optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
        variables = {
            "model": model.variables,
            "optimizers": [variable for each in optimizers for variable in each.variables],
            "metrics": model.metrics_variables,
        }
        values = checkpoints.values_of(variables)
        stop_training = model.stop_training
        try:
            yield
        finally:
            checkpoints.assign(variables, values)
            model.stop_training = stop_training


def alternating(runs: Mapping[Name, Run]) -> dict[Name, float]:
    """Make all runs in every round, as a busy machine then disturbs all alike; keep the fastest.

    Each was made once before, so that everything is compiled.
    """
    rounds = [{name: run() for name, run in runs.items()} for _ in range(_ROUNDS)]
    return {name: min(times[name] for times in rounds) for name in runs}


def _endless(data: Any, batch_size: int | None) -> dict[str, Any]:
    """Return the arguments with which `fit` does not end by itself."""
    if _batch.is_tf_dataset(data):
        return {"x": data.repeat(), "epochs": 1, "steps_per_epoch": _ENDLESS}
    if _batch.are_arrays(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        parts = {"x": x, "y": y, "sample_weight": sample_weight}
        return {**parts, "batch_size": batch_size, "epochs": _ENDLESS}
    if isinstance(data, keras.utils.PyDataset):
        data = copy.copy(_batch.untracked(data))  # a copy counts its epochs
    return {"x": data, "epochs": _ENDLESS}


class _SameBatch(keras.utils.PyDataset):
    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def __len__(self) -> int:
        return _BATCHES_OF_SAME

    def __getitem__(self, index: int) -> Any:
        return self._batch


def _held(first: Any) -> Any:
    """Return a dataset of one batch in memory, with no other work to do."""
    batch = keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(first))
    if keras.backend.backend() == "jax":
        return _SameBatch(_batch.as_arrays(batch))
    import tensorflow as tf

    from kdpkit._internal.dataset_tuning import untuned

    return untuned(tf.data.Dataset.from_tensors(batch).repeat())
