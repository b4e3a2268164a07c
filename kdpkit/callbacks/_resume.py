"""Going on where a run was stopped: with its weights, its randomness and its place in the data."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import keras

from kdpkit import _checks, _files, _processes, _versions, checkpoints
from kdpkit.callbacks import _signals, _stopping, _tracked

_OF_DATA = ("batches_in_an_epoch", "global_batch_size", "seed")  # may change between epochs

EXIT_CODE = 42  # of a run that a SIGTERM stopped, as in TensorFlow's PreemptionCheckpointHandler

# What callbacks of Keras learn while they train; theirs has no name for it.
_LEARNED = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save"),
}


class Resume(keras.callbacks.Callback):
    """Saves the state of training, and goes on from it when the same program is started again.

    The state is all that decides what comes next: weights, optimizer, the states of random layers,
    metrics of the epoch at hand, History, the callbacks named, and the place in the data. So a run
    that was stopped between any two steps ends with the weights of one that was not, dropout
    included. Give the dataset through `track`, and the callback last:

        resume = Resume("state")
        model.fit(resume.track(batches), epochs=10, shuffle=False, callbacks=[resume])

    On SIGTERM, by which clusters end a job, the step at hand is finished, the state saved, and the
    program left with exit code 42; during validation, which then is not repeated, after its batch
    at hand: that epoch is missing in History, and in what callbacks learn. So it is on Ctrl-C, but
    that a `KeyboardInterrupt` is raised, as Python users expect; the second one ends the program at
    once. After training, or when it has failed, signals do what they always do.

    With several processes all stop before the same step when one gets the signal, on TensorFlow
    within about a second, or when a validation under way is over; the first process writes, and all
    must see the directory. When one is killed and all are started again, they go on from the last
    state. Among several of JAX that is for SIGTERM alone: Ctrl-C ends each of them at once.

    Args:
        directory: Where the states are; a new run needs an empty one. It may be in object storage,
            as `gs://bucket/run`, which has no locks: the run that began last has the directory, and
            one that began before stops, in one sentence, before it would save there again.
        save_freq: `"epoch"`, or a number of batches.
        keep: States to keep. One that is damaged is passed over, with a warning.
        callbacks: Those among the callbacks given to `fit` that learn while training, such as
            `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`, or others that have
            `get_state()`, which gives plain values by name, and `set_state(values)`.

    Raises:
        ValueError: Bad arguments; at the begin of training a state of another model, a dataset that
            was not tracked, a directory that another run is using, or processes that see different
            states.

    >>> import tempfile
    >>> from kdpkit import batches, testing
    >>> def train(epochs, directory):
    ...     keras.utils.set_random_seed(0)
    ...     model = testing.tiny_classifier()
    ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ...     data = batches.ArrayBatches(
    ...         testing.toy_classification(12), global_batch_size=4, seed=0
    ...     )
    ...     resume = Resume(directory)
    ...     return model.fit(
    ...         resume.track(data), epochs=epochs, shuffle=False, callbacks=[resume], verbose=0
    ...     )
    >>> with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    ...     stopped, resumed, whole = train(1, one), train(2, one), train(2, other)
    >>> resumed.history["loss"] == whole.history["loss"]
    True
    """

    # On JAX Keras calls hooks at the end of a batch in threads of its own, and so need not wait for
    # every step. Here they touch no model there; those at its beginning are called as ever.
    async_safe = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_freq: str | int = "epoch",
        keep: int = 3,
        callbacks: Iterable[keras.callbacks.Callback] = (),
    ) -> None:
        super().__init__()
        if not isinstance(save_freq, str) or save_freq != "epoch":
            save_freq = _save_freq(save_freq)
        self.save_freq = save_freq
        self._most_unsaved = math.inf if save_freq == "epoch" else float(save_freq)
        self.callbacks = keras.tree.flatten(callbacks or ())
        self._checkpoints = checkpoints.CheckpointDirectory(directory, keep=keep)
        self._dataset: _tracked.Tracked | None = None
        self._restored: checkpoints.TrainingState | None = None
        self._at_once = 1  # batches in an execution
        self._epoch = 0
        self._first = 0  # batches that this epoch had before this run
        self._done = 0  # batches of this epoch
        self._saved = 0  # of these; negative if the last state is of an earlier epoch
        self._counting = threading.Lock()  # JAX tells of the ends of batches in several threads
        self._signals = _signals.HeldSignals()
        self._stop = _stopping.AgreedStop(self._signals)
        self._catching = contextlib.ExitStack()
        self._lock = self._checkpoints.directory / ".lock"
        for callback in self.callbacks:
            _state_of(callback)  # refuses one that has none

    def track(self, dataset: Any) -> Any:
        """Give a dataset to train on in place of this one, which can begin anywhere.

        It takes what `kdpkit.pipelines.train_pipeline` gave, as it is: with a stage after that it
        could not be moved. Or a `keras.utils.PyDataset`: an `epoch` attribute, as
        `kdpkit.batches.ArrayBatches` has, is set to the epoch to go on in; without one,
        `on_epoch_end` is called once for every epoch that is over. With several `workers` nobody
        sees whether Keras shuffles the batches: `fit` needs `shuffle=False`.

        Raises:
            ValueError: It is neither.
        """
        self._dataset = _tracked.tracked(dataset)
        return self._dataset.given

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take up the newest state, if there is one."""
        self._catching.close()  # if training before this one has failed
        if self._dataset is None:
            _checks.refuse("`Resume` does not know the dataset; train on `resume.track(dataset)`.")
        steps, length = self.params.get("steps"), self._dataset.full_length
        if None not in (steps, length) and steps != length:
            _checks.refuse(
                "`Resume` counts whole epochs of the dataset.",
                steps_per_epoch=steps,
                batches_in_the_dataset=length,
                remedy="Give `steps_per_epoch` to the dataset and not to `fit`.",
            )
        if _processes.index() == 0:
            self._make_directory()
        self._restored = state = self._checkpoints.latest()
        _processes.require_equal(
            "The newest state, by epoch and step,",
            (state.epoch, state.step) if state else (-1, -1),
            remedy="Give `Resume` a directory that all of them see.",
            strategy=self._strategy(),
        )
        if state:
            self._take_up(state)
        else:
            self._dataset.start()
        self._at_once = getattr(self.model, "steps_per_execution", 1)
        self._stop.begin()
        if _processes.count() == 1 or keras.backend.backend() != "jax":  # which handles SIGTERM
            self._signals.hold()

    def _make_directory(self) -> None:
        directory = self._checkpoints.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            is_ours = _files.acquire(self._lock)
        except _checks.InputError:
            raise
        except OSError as error:
            _checks.refuse_file(f"The directory cannot be used ({error.strerror})", directory)
        if not is_ours:
            _checks.refuse(
                "Another run keeps its state in this directory, and goes on.",
                directory=str(directory),
                lock=str(self._lock),
                remedy="End it first, or give each run a directory of its own. If its machine is "
                "lost, remove the lock.",
            )

    def _take_up(self, state: checkpoints.TrainingState) -> None:
        model = self.model
        self._check_setup(state)
        if sum(name.startswith("model.") for name in state.arrays) > len(model.variables):
            self._build()
        if model.optimizer and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        checkpoints.assign(self._variables(model), state.arrays)
        self._set_callbacks(state)
        epochs = self.params["epochs"]
        model._initial_epoch = epochs if state.notes["stopped"] else state.epoch
        if model._initial_epoch >= epochs:
            warnings.warn(
                f"Nothing is left to train: the state in {self._checkpoints.directory} is that of "
                f"a run that is over after {state.epoch} of {epochs} epochs. For more ask for more "
                "`epochs`, for another run give another directory.",
                stacklevel=2,
            )
        self._dataset.go_to(state.epoch, state.step)  # type: ignore[union-attr]

    def _check_setup(self, state: checkpoints.TrainingState) -> None:
        """Refuse to go on with what would not be the same run."""
        saved, present = state.notes["setup"], self._setup(self.model)
        for name, value in present.items():
            is_of_data = name in _OF_DATA
            if saved[name] != value and (state.step or not is_of_data):
                _checks.refuse(
                    f"The saved state is of a run with another {name.replace('_', ' ')}"
                    + (", and stopped inside an epoch." if is_of_data else "."),
                    saved=saved[name],
                    **{name: value},
                    remedy="Go on with what it had, or choose another directory.",
                )

    def _setup(self, model: Any) -> dict[str, Any]:
        """Say what must stay the same for a run to go on."""
        dataset = self._dataset
        return {
            "optimizers": [type(optimizer).__name__ for optimizer in _optimizers(model)],
            "callbacks": [type(callback).__name__ for callback in self.callbacks],
            "batches_in_an_epoch": self._length(),
            "global_batch_size": dataset.global_batch_size,  # type: ignore[union-attr]
            "seed": dataset.seed,  # type: ignore[union-attr]
        }

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In the first epoch of a run that goes on, take up what Keras has just reset."""
        self._epoch, self._first = epoch, 0
        if state := self._take_restored():
            self._first = self._saved = state.step
            if state.step:
                self._build_metrics()
                metrics = {"metrics": self._metrics(self.model)}
                # All of it: other callbacks began this epoch once before, a rate's schedule, say.
                checkpoints.assign(self._variables(self.model) | metrics, state.arrays)
                # Keras would warn that the rest of an epoch is shorter than an epoch.
                self._catching.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Your input ran out of data")
        self._done = self._first

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is time; the end of an epoch is saved when all of it is done."""
        done = self._first + batch
        length = self._length()
        if length is not None and done >= length:
            # Of the rest of an epoch Keras on TensorFlow asks for a batch too many. A step without
            # data changes no weight, but counts; this is how Keras hears of an end.
            raise StopIteration
        if batch and not self._dataset.is_used:  # type: ignore[union-attr]
            _checks.refuse("`fit` trains on another dataset; give it `resume.track(dataset)`.")
        if self._is_to_stop():
            self._save(self._epoch, done)
            self._leave()
        if done - self._saved >= self._most_unsaved:
            self._save(self._epoch, done)
        self._count(done + self._at_once)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count."""
        self._count(self._first + _versions.last_batch(batch, self._at_once) + 1)

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Let a validation end with this batch when the program is to end.

        Several processes finish it, and stop with the epoch.
        """
        if _processes.count() == 1 and self._is_to_stop():
            self.model.stop_evaluating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leave, without the results of a part of the validation."""
        if self._stop.signal:
            is_over = self._done >= (self._length() or 0)  # else a callback has stopped training
            self._save(*((self._epoch + 1, 0) if is_over else (self._epoch, self._done)))
            self._leave()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the end of an epoch."""
        self._catching.close()
        if self._done < (self._length() or 0):  # a callback stopped training
            self._save(epoch, self._done)
            return
        self._saved -= self._done
        stops = self._is_to_stop(asks_now=True)
        if stops or self.save_freq == "epoch" or -self._saved >= self._most_unsaved:
            self._save(epoch + 1, 0, logs)
        if stops:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give History what it had, if there was no epoch left."""
        self._take_restored()
        _files.release(self._lock)
        self._signals.release()
        if self._signals.received:  # too late to be heard by an epoch
            signal.raise_signal(self._signals.received)

    def _count(self, done: int) -> None:
        """Count when a step begins, and when it ends.

        On JAX Keras may tell of the ends too late, and a loop tells only then how many they are.
        """
        with self._counting:
            self._done = max(self._done, min(done, self._length() or done))

    def _length(self) -> int | None:
        """Give the batches in a whole epoch."""
        return self._dataset.full_length or self.params.get("steps")  # type: ignore[union-attr]

    def _take_restored(self) -> checkpoints.TrainingState | None:
        """Give History and callbacks what they had; give the state, once."""
        self.model._initial_epoch = None  # Keras has read it; the next training begins with 0
        state, self._restored = self._restored, None
        if state:
            history = self.model.history
            history.history, history.epoch = state.notes["history"], state.notes["epochs"]
            self._set_callbacks(state)
        return state

    def _set_callbacks(self, state: checkpoints.TrainingState) -> None:
        for index, values in enumerate(state.notes["callbacks"]):
            _set_state(self.callbacks[index], values, _arrays_of(index, state.arrays))

    def _save(self, epoch: int, step: int, logs: dict[str, Any] | None = None) -> None:
        """Save the state at a place in the data, with the logs of an epoch that has just ended."""
        self._saved = step
        model = self.model
        # In all processes, since some values are the sum of what they hold.
        arrays = checkpoints.values_of(
            {**self._variables(model), "metrics": self._metrics(model) if step else []}
        )
        if _processes.index() > 0:
            return
        states = [_state_of(callback) for callback in self.callbacks]
        for index, (_, weights) in enumerate(states):
            arrays |= {f"callback.{index}.{i}": weight for i, weight in enumerate(weights)}
        history = {name: [*of] for name, of in model.history.history.items()}
        epochs = [*map(int, model.history.epoch)]
        if logs is not None and epoch - 1 not in epochs:  # Keras calls History last
            epochs.append(epoch - 1)
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
        notes = {
            "setup": self._setup(model),
            "stopped": bool(model.stop_training) and step == 0,
            "history": {name: [*map(_plain, values)] for name, values in history.items()},
            "epochs": epochs,
            "callbacks": [values for values, _ in states],
        }
        state = checkpoints.TrainingState(epoch=epoch, step=step, arrays=arrays, notes=notes)
        try:
            self._refuse_if_taken_over()
            self._checkpoints.save(state)
        except OSError as error:
            warnings.warn(
                f"The state of training could not be saved in {self._checkpoints.directory} "
                f"({error.strerror or error}). Training goes on; what was saved before is still "
                "there.",
                stacklevel=2,
            )

    def _refuse_if_taken_over(self) -> None:
        other = _files.taken_over(self._lock)
        if other:
            _checks.refuse(
                "Another run, which began later, keeps its state in this directory, so this one "
                "stops.",
                directory=str(self._checkpoints.directory),
                other=other,
                remedy="Give each run a directory of its own.",
            )

    def _variables(self, model: Any) -> dict[str, list[Any]]:
        return {
            "model": model.variables,
            "optimizer": [variable for o in _optimizers(model) for variable in o.variables],
        }

    def _build_metrics(self) -> None:
        """Let Keras make the metrics' variables now; on TensorFlow it does so in the first step."""
        parts = [part.built for part in self.model.metrics if hasattr(part, "built")]
        if not all(parts):
            self._build()

    def _build(self) -> None:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(
            self._dataset.first_batch()  # type: ignore[union-attr]
        )
        self.model.test_on_batch(x, y, weight)
        self.model.reset_metrics()

    def _metrics(self, model: Any) -> list[Any]:
        own = [v for metric in self.params.get("metrics", ()) for v in metric.variables]
        return [*model.metrics_variables, *own]

    def _is_to_stop(self, *, asks_now: bool = False) -> bool:
        return self._stop.is_due(self._strategy(), asks_now=asks_now)

    def _strategy(self) -> Any:
        return getattr(self.model, "distribute_strategy", None)

    def _leave(self) -> None:
        if _processes.count() > 1:
            # The first one has written the state: who starts them may end all when one leaves.
            _processes.gathered([0], self._strategy())
        _files.release(self._lock)
        by_ctrl_c = self._stop.signal == signal.SIGINT
        self._stop.begin()
        said = (
            f"Training was stopped by {'Ctrl-C' if by_ctrl_c else 'SIGTERM'}. Its state is in "
            f"{self._checkpoints.directory}, and the same program goes on from there."
        )
        if by_ctrl_c:
            self._signals.release()
            raise KeyboardInterrupt(said)
        self._signals.release_to_leave()
        sys.stderr.write(f"\n{said}\n")
        raise SystemExit(EXIT_CODE)


def _save_freq(value: Any) -> int:
    try:
        return _checks.integer("save_freq", value)
    except ValueError as error:
        raise _checks.InputError(f'{error} Or give "epoch".') from None


def _optimizers(model: Any) -> list[Any]:
    """Give a model's optimizers, each once."""
    owned = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    return [*{id(optimizer): optimizer for optimizer in owned}.values()]


def _state_of(callback: Any) -> tuple[dict[str, Any], list[Any]]:
    """Give what a callback has learned: plain values, and weights."""
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        return keras.tree.map_structure(_plain, callback.get_state()), []
    for kind, names in _LEARNED.items():
        if isinstance(callback, kind):
            values = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
            weights = values.pop("best_weights", None)
            return {name: _plain(value) for name, value in values.items()}, weights or []
    return _checks.refuse(
        "`Resume` does not know what this callback learns.",
        callback=type(callback).__name__,
        remedy="Give the callback `get_state()` and `set_state(values)`, or leave it out.",
    )


def _set_state(callback: Any, values: dict[str, Any], weights: list[Any]) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(values)
        return
    for name, value in values.items():
        setattr(callback, name, value)
    if weights:
        callback.best_weights = weights


def _arrays_of(index: int, arrays: Any) -> list[Any]:
    prefix = f"callback.{index}."
    count = sum(name.startswith(prefix) for name in arrays)
    return [arrays[f"{prefix}{i}"] for i in range(count)]


def _plain(value: Any) -> Any:
    """Turn numbers and arrays of NumPy and of the backend into Python's."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return keras.ops.convert_to_numpy(value).tolist()
