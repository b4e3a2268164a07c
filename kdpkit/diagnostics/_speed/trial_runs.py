"""Training for a moment, so that a step's time is known and nothing is changed by it."""

import contextlib
import copy
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from kdpkit import _versions, checkpoints
from kdpkit.diagnostics import _batch, _tpu_step
from kdpkit.diagnostics._python_time import PythonWatch

_WARM_UP = 2  # executions, after which everything is compiled and buffers have begun to fill
_LEAST = 3  # executions that are timed, however long they take
_ENDLESS = 10**9  # epochs, or steps: a clock ends them
_ROUNDS = 4  # in which all take turns, after one that warms up
_BATCHES_OF_SAME = 1000  # in an epoch of one batch that is given again and again

Run = Callable[[], float]


class Clock(keras.callbacks.Callback):
    """Times steps, and stops training when there are enough of them.

    On JAX Keras calls it from threads of its own, when a step's result is there.

    Args:
        seconds: How long to time.
        watch: Watches Python's functions meanwhile.
    """

    async_safe = True

    def __init__(self, seconds: float, watch: PythonWatch | None = None) -> None:
        super().__init__()
        self._seconds = seconds
        self._watch = watch
        self._ends: list[tuple[int, float]] = []  # steps done after each execution, and when
        self._lock = threading.Lock()
        self._before = 0

    def set_model(self, model: Any) -> None:
        """Keep the model; `self.model` would wait for every step of JAX."""
        self._trained = model

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Go on counting."""
        del epoch, logs
        self._before = max(self._ends, default=(0, 0.0))[0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time, and stop if it is enough."""
        del logs
        now = time.perf_counter()
        last = _versions.last_batch(batch, self._trained.steps_per_execution)
        with self._lock:
            self._ends.append((self._before + last + 1, now))
            timed = self._ends[_WARM_UP - 1 :]
        if len(timed) == 1 and self._watch:
            self._watch.start()
        if len(timed) > _LEAST and now - timed[0][1] >= self._seconds:
            self._trained.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """End the watch."""
        del logs
        if self._watch:
            self._watch.stop()

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

    def __init__(self, trainer: Any, first: Any, batch_size: int | None) -> None:
        self.trainer = trainer
        self.model = _tpu_step.model_of(trainer)
        self.is_loop = _tpu_step.is_loop(trainer)
        self._batch_size = batch_size
        self._compiled: dict[Any, Any] = {}
        self.held = _held(first)
        self._build(first)

    def _build(self, first: Any) -> None:
        if not self.is_loop:
            _tpu_step.build(self.model, first)
            self._build_optimizer()
            return
        steps = self.trainer._steps
        steps.build(steps.open(self.held, "dataset", steps=1), training=True)

    def _build_optimizer(self) -> None:
        """Make the optimizer's variables, which `fit` may only make in its first step."""
        model, strategy = self.model, getattr(self.model, "distribute_strategy", None)
        if model.optimizer is not None and not model.optimizer.built:
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model.optimizer.build(model.trainable_variables)

    @property
    def replicas(self) -> int:
        """Replicas that share a batch, on TensorFlow."""
        strategy = getattr(self.model, "distribute_strategy", None)
        return int(getattr(strategy, "num_replicas_in_sync", 1))

    def seconds_per_step(
        self, data: Any, seconds: float, callbacks: Any = (), watch: PythonWatch | None = None
    ) -> float:
        """Train, and give the mean time of a step."""
        clock = Clock(seconds, watch)
        arguments = _endless(data, self._batch_size)
        if self.is_loop:
            arguments["train"] = arguments.pop("x")
        elif _batch.is_tf_dataset(data):
            arguments["shuffle"] = False  # Keras cannot, and would warn
        fit = self.trainer.fit if self.is_loop else _tpu_step.fit_of(self.model)
        with _tpu_step.history_kept(self.model), self._arrays_kept():
            fit(**arguments, callbacks=[*map(copy.copy, callbacks), clock], verbose=0)
        if data is not self.held:
            # Its iterator would read on into the next run. And if a thread of tf.data collects it
            # later, it may wait there for its own end.
            del arguments
            gc.collect()
        return clock.seconds_per_step

    def _arrays_kept(self) -> Any:
        """Have plain Keras on several replicas write into no array of the user's."""
        if self.replicas == 1 or self.is_loop or "fit" in vars(self.model):
            return contextlib.nullcontext()
        from kdpkit._private_copies import private_batches  # TensorFlow is there

        return private_batches(self.model.distribute_strategy)

    @contextlib.contextmanager
    def changed(self, owner: Any, **settings: Any) -> Iterator[None]:
        """Have a model or a loop other settings, and a compiled step of their own, for a while."""
        key = tuple(settings.items())
        of_step = self.model.train_function
        before = {name: getattr(owner, name) for name in settings}
        self.model.train_function = self._compiled.get(key)
        _set(owner, settings)
        try:
            yield
        finally:
            self._compiled[key] = self.model.train_function
            _set(owner, before)
            self.model.train_function = of_step

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Give the model back as it was, trained not at all, whatever happens meanwhile."""
        model = self.model
        optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
        variables = {
            "model": model.variables,
            "optimizers": [
                variable for optimizer in optimizers for variable in optimizer.variables
            ],
            "metrics": model.metrics_variables,
        }
        values = checkpoints.values_of(variables)
        stop_training = model.stop_training
        try:
            yield
        finally:
            checkpoints.assign(variables, values)
            model.stop_training = stop_training


def _set(owner: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(owner, name, value)


def in_turns(runs: Mapping[str, Run]) -> dict[str, float]:
    """Make all runs in every round, so that a busy machine disturbs all alike; give the fastest.

    The others were disturbed. Each was made once before, so that everything is compiled.
    """
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            figures[name].append(run())
    return {name: min(of) for name, of in figures.items()}


def _endless(data: Any, batch_size: int | None) -> dict[str, Any]:
    """Give the arguments with which `fit` does not end by itself."""
    if _batch.is_tf_dataset(data):
        return {"x": data.repeat(), "epochs": 1, "steps_per_epoch": _ENDLESS}
    if _batch.are_arrays(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        parts = {"x": x, "y": y, "sample_weight": sample_weight}
        return {**parts, "batch_size": batch_size, "epochs": _ENDLESS}
    if isinstance(data, keras.utils.PyDataset):
        data = copy.copy(vars(data).get("_dataset", data))  # of `Resume`; a copy counts its epochs
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
    """Give a dataset that has one batch in memory, and nothing to do for it."""
    batch = keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(first))
    if keras.backend.backend() == "jax":
        as_array = functools.partial(keras.tree.map_structure, _as_array)
        return _SameBatch(as_array(batch))
    import tensorflow as tf

    from kdpkit._tuning import untuned

    return untuned(tf.data.Dataset.from_tensors(batch).repeat())


def _as_array(part: Any) -> Any:
    return part if part is None else np.asarray(part)
