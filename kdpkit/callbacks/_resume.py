"""Resume a run where it stopped: weights, random state and position in the data."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from kdpkit import checkpoints, errors
from kdpkit._internal import atomic_files, background, checks, processes, versions
from kdpkit.callbacks import (
    _callback_state,
    _last_step,
    _model_state,
    _signals,
    _stopping,
    _tracked,
)

_OF_DATA = ("batches_in_an_epoch", "global_batch_size", "seed")  # may change between epochs


class Resume(keras.callbacks.Callback):
    """Saves the state of training, and restores it when the program is started again.

    The state includes weights, optimizer, random layers, metrics, History, the given callbacks, and
    the position in the data. A run that was stopped between any two steps ends with the same
    weights as an uninterrupted one. Train on `track(dataset)`, and pass this callback last.

    A save stops training while the values are read. They are then written in the background, and
    the next save, the end of `fit` and an exit wait until they are on disk. A crash meanwhile
    leaves the state before. A state that cannot be written is reported, by a warning, at the next
    of these points; training continues.

    On SIGTERM, which clusters send to end a job, the current step or validation batch is finished,
    the state is saved, and the program exits with code 42. Ctrl-C does the same but raises
    `KeyboardInterrupt`; a second Ctrl-C ends the program at once. If one of several processes gets
    the signal, all stop before the same step (on JAX only for SIGTERM). The first process writes,
    and all must be able to read the directory. `request_stop()` does the same where no signal
    arrives, as off the main thread.

    Args:
        directory: Directory of the states; a new run needs an empty one. Object storage
            (`gs://bucket/run`) has no locks: the most recently started run owns the directory, and
            an earlier one stops with an error instead of saving there again.
        save_freq: `"epoch"`, or a number of batches.
        keep: Number of states to keep. A damaged one is skipped with a warning.
        callbacks: Callbacks passed to `fit` that have state: `EarlyStopping`, `ReduceLROnPlateau`,
            `ModelCheckpoint`, `SwapEMAWeights`, or others with `get_state()`, which returns plain
            values by name, and `set_state(values)`.

    Raises:
        ValueError: An argument is invalid. When training begins: the state is of another model, the
            dataset was not tracked, another run uses the directory, or processes see different
            states.

    >>> import tempfile
    >>> from kdpkit import batches, testing
    >>> model, data = testing.tiny_classifier(), testing.toy_classification(12)
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> resume = Resume(tempfile.mkdtemp())
    >>> train = resume.track(batches.ArrayBatches(data, global_batch_size=4))
    >>> history = model.fit(train, epochs=2, shuffle=False, callbacks=[resume], verbose=0)
    """

    # On JAX Keras calls `on_train_batch_end` in other threads, so it need not wait for every step.
    # That hook does not use the model; `on_train_batch_begin` is called as usual.
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
        self.save_freq = save_freq if save_freq == "epoch" else _save_freq(save_freq)
        self._most_unsaved = math.inf if save_freq == "epoch" else float(self.save_freq)
        self.callbacks = keras.tree.flatten(callbacks or ())
        self._checkpoints = checkpoints.CheckpointDirectory(directory, keep=keep)
        self._dataset: _tracked.Tracked | None = None
        self._is_training = False
        self._restored: checkpoints.TrainingState | None = None
        self._at_once = 1  # batches in an execution
        self._epoch = 0
        self._has_trained_an_epoch = False  # of this call of `fit`
        self._first = 0  # batches of this epoch trained by earlier runs
        self._done = 0  # batches of this epoch
        self._saved = 0  # batches saved; negative if the last state is of an earlier epoch
        self._epochs_ahead: int | None = None  # of the data, if Keras does not count from its first
        self._ended: int | None = None  # the epoch of a state in which training left a model here
        self._ends: list[dict[str, Any]] = []  # of the calls of `fit` that are over
        self._end: dict[str, Any] | None = None  # of this call, if the state is of a later one
        self._last_step = _last_step.LastStep()
        self._counting = threading.Lock()  # on JAX batches end in several threads
        self._signals = _signals.HeldSignals()
        self._stop = _stopping.AgreedStop(self._signals)
        self._catching = contextlib.ExitStack()
        self._lock = self._checkpoints.directory / ".lock"
        for callback in self.callbacks:
            _callback_state.state_of(callback)  # raises for an unknown kind

    def track(
        self, dataset: Any, *, global_batch_size: int | None = None, seed: int | None = 0
    ) -> Any:
        """Return a dataset to train on instead of this one, which can start at any batch.

        - A `tf.data.Dataset`: what `kdpkit.pipelines.train_pipeline` returned, without further
          stages, or any other whose order can be had again. `shuffle` needs a seed (or
          `keras.utils.set_random_seed` before it), and random numbers have to be stateless. Epoch
          E is the E-th iteration of a new dataset, whoever else iterates it. Functions are traced
          again; stages with `deterministic=False` are in order. What was trained on is skipped,
          before maps that change no state and after `shuffle`.
        - Arrays `x`, `(x, y)` or `(x, y, sample_weight)`: cut into batches of `global_batch_size`,
          the last one smaller, in a new order each epoch that `seed` fixes; None keeps theirs. A
          `train_step` of the model's own gets `x` alone as `(x,)`.
        - A `keras.utils.PyDataset`: `on_epoch_end` is called once for every completed epoch, and
          its `epoch` attribute, as in `kdpkit.batches.ArrayBatches`, is set to the epoch to
          continue in.
        - A Grain dataset or `DataLoader`, in one process. A `MapDataset` that ends has an order
          that is the same in each epoch.

        What never ends, and a Grain `IterDataset` or `DataLoader`, which do not know their
        length, needs `fit(steps_per_epoch=...)`: an epoch continues where the last one stopped, and
        is saved at its end alone, on SIGTERM too.
        But for `tf.data`, `fit` needs `shuffle=False`. Data that comes from Python (generators,
        `py_function`) has to be the same each time.

        Raises:
            ValueError: It is none of these, or its order cannot be had again; the message names the
                stage.

        >>> import tempfile
        >>> resume = Resume(tempfile.mkdtemp())
        >>> train = resume.track((np.zeros((6, 2)), np.zeros(6)), global_batch_size=4, seed=1)
        >>> len(train)
        2
        """
        self._dataset = _tracked.tracked(dataset, global_batch_size=global_batch_size, seed=seed)
        return self._dataset.given

    def request_stop(self) -> None:
        """Save the state before the next step and exit with code 42, as after SIGTERM.

        For programs that get no signal, such as a notebook, or Ray, whose training is not in the
        main thread. It may be called from any thread, in any of several processes; `SystemExit` is
        raised where `fit` was called. Before training it has no effect.

        >>> import tempfile
        >>> Resume(tempfile.mkdtemp()).request_stop()
        """
        self._signals.request()
        if processes.count() > 1 and keras.backend.backend() == "jax":
            signal.raise_signal(signal.SIGTERM)  # JAX makes it known to the other processes

    @property
    def _data(self) -> _tracked.Tracked:
        assert self._dataset is not None  # `on_train_begin` raises if there is none
        return self._dataset

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the newest state, if there is one."""
        self._catching.close()  # if an earlier training failed
        if self._dataset is None:
            checks.fail("`Resume` does not know the dataset; train on `resume.track(dataset)`.")
        self._check_steps(self._dataset)
        self._of_model = _model_state.ModelState(self.model, self.params.get("metrics", ()))
        if processes.index() == 0:
            self._make_directory()
        self._restored = state = self._checkpoints.latest()
        processes.require_equal(
            "The newest state, by epoch and step,",
            (state.epoch, state.step) if state else (-1, -1),
            remedy="Use a directory that all of them see.",
            strategy=_model_state.strategy_of(self.model),
        )
        self._at_once = getattr(self.model, "steps_per_execution", 1)
        self._has_trained_an_epoch = False
        if state:
            self._restore(state)
        else:
            self._epochs_ahead = self._end = None
            self._dataset.start()
        self._is_training = True
        self._stop.begin()
        if processes.count() == 1 or keras.backend.backend() != "jax":  # JAX handles SIGTERM itself
            self._signals.hold()

    def _check_steps(self, dataset: _tracked.Tracked) -> None:
        steps, length = self.params.get("steps"), dataset.full_length
        if steps is length is None:
            checks.fail(
                "The dataset never ends, or does not know its length.",
                remedy="Pass the batches of an epoch to `fit` as `steps_per_epoch`.",
            )
        if None not in (steps, length) and steps != length:
            checks.fail(
                "`Resume` counts complete epochs of the dataset.",
                steps_per_epoch=steps,
                batches_in_the_dataset=length,
                remedy="Pass `steps_per_epoch` to the dataset and not to `fit`.",
            )

    def _make_directory(self) -> None:
        directory = self._checkpoints.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            is_ours = atomic_files.acquire(self._lock)
        except errors.InputError:
            raise
        except OSError as error:
            checks.fail_for_file(f"The directory cannot be used ({error.strerror})", directory)
        if not is_ours:
            checks.fail(
                "Another run is using this directory.",
                directory=str(directory),
                lock=str(self._lock),
                remedy="End it first, or use another directory. If its machine is lost, remove the "
                "lock.",
            )

    def _restore(self, state: checkpoints.TrainingState) -> None:
        epochs = self.params["epochs"]
        was_left_here = self._ended == state.epoch and state.step == 0
        self._end = self._end_before(state, epochs)
        was_stopped = state.notes["stopped"] and state.step == 0 and not was_left_here
        is_over = was_stopped or self._end is not None
        first = epochs if is_over else state.epoch
        if not was_left_here:
            self._check_setup(state, is_trained_on=first < epochs)
            self._restore_model(state, is_trained_on=first < epochs)
        self._set_callbacks(state)
        self._was_trainable = self._of_model.trainable()
        self._epochs_ahead = state.notes.get("epochs_ahead", 0)
        self.model._initial_epoch = first
        if first >= epochs and self._end is None:
            self.model.stop_training = was_stopped
            self._warn_of_the_end(state, was_stopped=was_stopped)
        elif first < epochs and not (was_left_here and self._data.counts_epochs):
            self._go_to(state)

    def _end_before(self, state: checkpoints.TrainingState, epochs: int) -> dict[str, Any] | None:
        """Return where this call of `fit` ended, if a state is of a later one of the program."""
        for end in state.notes.get("ends", [])[len(self._ends) :][:1]:
            if end["stopped"] or end["epoch"] >= epochs:
                return end
        return None

    def _restore_model(self, state: checkpoints.TrainingState, *, is_trained_on: bool) -> None:
        if not self._is_of_a_loop() and self._of_model.lacks_variables(state):
            self._build()  # as a loop has done
        if self._end is not None:
            if not self._of_model.has_variables_of(state):  # a later phase added some
                return
            state = _model_state.with_seeds(state, self._end["seeds"])
        self._of_model.restore(state, is_trained_on=is_trained_on)

    def _warn_of_the_end(self, state: checkpoints.TrainingState, *, was_stopped: bool) -> None:
        directory, epochs = self._checkpoints.directory, self.params["epochs"]
        if was_stopped or (state.epoch, state.step) == (epochs, 0):
            self._ended = state.epoch
            self._go_to(state)
        warnings.warn(
            f"Nothing is left to train: the state in {directory} is that of a run "
            + (
                f"that a callback stopped after {state.epoch} epochs. To train on, call `fit` once "
                "more; "
                if was_stopped
                else f"that is over after {state.epoch} of {epochs} epochs. For more, pass more "
                "`epochs`; "
            )
            + "for another run, use another directory.",
            stacklevel=3,
        )

    def _go_to(self, state: checkpoints.TrainingState) -> None:
        """Have the data start where a state was saved."""
        epoch, step = state.epoch, state.step
        if step and step == self._length():  # see `_return_last_step`
            epoch, step = (epoch + 1, 0) if self._is_of_a_loop() else (epoch, step - 1)
        self._data.go_to(*self._position(epoch, step), state.notes.get("place"))

    def _check_setup(self, state: checkpoints.TrainingState, *, is_trained_on: bool) -> None:
        """Raise if training would not continue the same run."""
        saved, present = state.notes["setup"], self._setup(self.model)
        for name, value in present.items():
            is_of_data = name in _OF_DATA and self._data.full_length is not None
            is_needed = is_trained_on or name == "callbacks"  # else of a later phase of a program
            if is_needed and saved[name] != value and (state.step or not is_of_data):
                checks.fail(
                    f"The saved state is of a run in which `{name.replace('_', ' ')}` differs"
                    + (", and stopped inside an epoch." if is_of_data else "."),
                    saved=saved[name],
                    **{name: value},
                    remedy="Continue with the saved setting, or use another directory.",
                )

    def _setup(self, model: keras.Model) -> dict[str, Any]:
        """Return what must stay the same to continue a run."""
        return {
            "optimizers": _model_state.names_of(_model_state.optimizers(model)),
            "callbacks": [type(callback).__name__ for callback in self.callbacks],
            "batches_in_an_epoch": self._length(),
            "global_batch_size": self._data.global_batch_size,
            "seed": self._data.seed,
        }

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In the first epoch of a resumed run, restore what Keras has just reset."""
        self._epoch, self._first = epoch, 0
        was_left_here, self._ended = self._ended is not None, None
        if self._epochs_ahead is None:
            self._epochs_ahead = self._data.first_epoch - epoch
        self._last_step.begin_epoch()
        if self._has_trained_an_epoch:
            self._data.begin_epoch(self._position(epoch, 0)[0])
        self._has_trained_an_epoch = True
        if state := self._restore_history():
            self._first = self._saved = state.step
            if not was_left_here:
                self._check_trainable(state)
            if state.step:
                # Other callbacks, such as a rate schedule, have already begun this epoch.
                self._of_model.restore_with_metrics(state)
                self._set_callbacks(state)
                # The rest of an epoch is shorter than an epoch: keras-team/keras#23360
                self._catching.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                if state.step == self._length():
                    self._return_last_step(state.notes)
            else:
                self._check_is_last(state)
        self._done = self._first

    def _check_trainable(self, state: checkpoints.TrainingState) -> None:
        """Raise if a callback no longer freezes what it had frozen, or the other way round.

        A state of an epoch's end is older than what callbacks do when the next epoch begins.
        """
        saved = state.notes.get("trainable", self._was_trainable)
        if state.step or self._was_trainable != saved:
            self._of_model.require_trainable(saved)

    def _check_is_last(self, state: checkpoints.TrainingState) -> None:
        """Raise if a callback was reset at the begin of training, after it had been restored."""
        for callback, saved in zip(self.callbacks, state.notes["callbacks"], strict=True):
            if _callback_state.was_reset(callback, saved):
                checks.fail(
                    "`Resume` must be the last callback: one after it forgot what was restored.",
                    callback=type(callback).__name__,
                    remedy="Call `fit(callbacks=[..., resume])`.",
                )

    def _return_last_step(self, notes: Mapping[str, Any]) -> None:
        """Continue after the last step of an epoch, which returns what it returned, once more."""
        self.model.stop_training = notes["stopped"]
        self._first -= 1
        if self._is_of_a_loop():
            self.params["resumed_logs"].update(notes["logs"])
            return
        self._catching.enter_context(_last_step.returning(self.model, notes["logs"]))

    def _is_of_a_loop(self) -> bool:
        return "resumed_logs" in self.params

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if it is due; the end of an epoch is saved in `on_epoch_end`."""
        done = self._first + batch
        length = self._length()
        if length is not None and done >= length:
            # docs/upstream/keras_begins_a_batch_too_many.md: this ends the epoch for Keras.
            raise StopIteration
        if batch and not self._data.is_used:
            checks.fail("`fit` trains on another dataset; pass it `resume.track(dataset)`.")
        if self._data.full_length is not None:
            self._save_inside_an_epoch(done)
        self._count(done + self._at_once)

    def _save_inside_an_epoch(self, done: int) -> None:
        """Save if it is due. Of what never ends Keras cannot train the rest of an epoch."""
        if done < self._saved:  # of this step its results alone are returned
            return
        if self._is_to_stop():
            self._save(self._epoch, done)
            self._leave()
        if done - self._saved >= self._most_unsaved:
            self._save(self._epoch, done)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count."""
        done = self._first + batch + 1
        self._count(done)
        if done >= (self._length() or math.inf):
            self._last_step.ended(logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep what a validation changes, such as the metrics, which Keras resets after this."""
        if not self._is_training:  # `evaluate` has been given this callback
            return
        goes_on = self.params.get("validation_goes_on")  # of a `TrainingLoop`
        if goes_on or versions.validates_on_the_next_batches(self.model):
            warnings.warn(
                "With `validation_steps` each epoch validates on the batches after those of the "
                "epoch before; a run that is gone on with begins at the first, so that its `val_` "
                "metrics differ. Validate on a complete dataset, such as `validation.take(steps)`.",
                stacklevel=2,
            )
        if processes.count() == 1:
            self._last_step.values = self._of_model.values_that_validation_changes()

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop validation before this batch if the program is to stop.

        Several processes finish the validation, and stop at the end of the epoch; so do runs on
        what never ends, whose states are those of ends of epochs.
        """
        is_alone = self._is_training and processes.count() == 1
        if is_alone and self._data.full_length is not None and self._is_to_stop():
            self.model.stop_evaluating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Exit after an interrupted validation, which the next run begins again."""
        if self._stop.signal:
            self._save(self._epoch, self._done, before_validation=self._last_step.values)
            self._leave()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the end of an epoch."""
        self._catching.close()
        is_complete = self._done >= (self._length() or 0)  # no callback has stopped training
        stops = self._is_to_stop(asks_now=True)
        if is_complete:
            self._saved -= self._done
            is_last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
            is_due = self.save_freq == "epoch" or -self._saved >= self._most_unsaved
            if stops or is_last or is_due:
                self._save(epoch + 1, 0, logs)
                self._ended = epoch + 1
        elif self._data.full_length is not None:
            self._save(epoch, self._done)
        if stops:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait until the last state is on disk; restore History if no epoch was left."""
        self._restore_history()
        self._is_training = False
        self._ends.append(
            self._end
            or {
                "epoch": 1 + max(self.model.history.epoch, default=-1),
                "stopped": bool(self.model.stop_training),
                "seeds": self._of_model.seeds(),
            }
        )
        self._wait()
        atomic_files.release(self._lock)
        self._signals.release()
        if self._signals.received and not self._signals.is_requested:  # after the last epoch
            signal.raise_signal(self._signals.received)

    def _count(self, done: int) -> None:
        """Count batches, when a step begins and when it ends.

        On JAX Keras may report ends late, and a `TrainingLoop` only reports the count at the end.
        """
        with self._counting:
            self._done = max(self._done, min(done, self._length() or done))

    def _length(self) -> int | None:
        """Return the number of batches in a complete epoch."""
        return self._data.full_length or self.params.get("steps")

    def _position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return a position in the data, which may be one that never ends."""
        epoch += self._epochs_ahead or 0
        if self._data.full_length is None:  # Keras has no execution of fewer steps at its end
            executions = math.ceil((self._length() or 0) / self._at_once)
            return 0, epoch * executions * self._at_once + step
        return epoch, step

    def _restore_history(self) -> checkpoints.TrainingState | None:
        """Restore History, which Keras has just reset; return the state, once."""
        self.model._initial_epoch = None  # Keras has used it; the next training starts at 0
        state, self._restored = self._restored, None
        if state:
            history, epochs = self.model.history, state.notes["epochs"]
            until = math.inf if self._end is None else self._end["epoch"]
            history.epoch = [epoch for epoch in epochs if epoch < until]
            history.history = {
                name: values[: len(history.epoch)] if len(values) == len(epochs) else values
                for name, values in state.notes["history"].items()
            }
        return state

    def _set_callbacks(self, state: checkpoints.TrainingState) -> None:
        for index, values in enumerate(state.notes["callbacks"]):
            weights = [
                a for name, a in state.arrays.items() if name.startswith(f"callback.{index}.")
            ]
            _callback_state.set_state(self.callbacks[index], values, weights)

    def _save(
        self,
        epoch: int,
        step: int,
        logs: dict[str, Any] | None = None,
        before_validation: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Save the state at a position in the data.

        Args:
            epoch: The epoch to continue in.
            step: Batches of it that were trained on.
            logs: The logs of an epoch that just ended.
            before_validation: Values that a validation has changed since, and those of metrics.
        """
        self._saved = step
        background.wait(self._checkpoints.directory)  # so that memory has one state at a time
        # In all processes, since some values are sums over processes.
        arrays = self._of_model.values()
        if step:
            arrays |= before_validation or self._of_model.metric_values()
        if processes.index() > 0:
            return
        states = [_callback_state.state_of(callback) for callback in self.callbacks]
        for index, (_, weights) in enumerate(states):
            arrays |= {f"callback.{index}.{i}": weight for i, weight in enumerate(weights)}
        history, epochs = self._history(epoch, logs)
        is_trained = bool(step) and step == self._length()
        notes = {
            "setup": self._setup(self.model),
            "stopped": bool(self.model.stop_training) and (is_trained or step == 0),
            "history": history,
            "epochs": epochs,
            "callbacks": [values for values, _ in states],
            "logs": _callback_state.plain_all(self._last_step.logs()) if is_trained else None,
            "place": None if is_trained else self._data.place(*self._position(epoch, step)),
            "epochs_ahead": self._epochs_ahead,
            "ends": [*self._ends],
            "trained": self._of_model.trained(),
            "trainable": self._of_model.trainable(),
        }
        state = checkpoints.TrainingState(epoch=epoch, step=step, arrays=arrays, notes=notes)
        background.start(self._checkpoints.directory, functools.partial(self._write, state))

    def _history(
        self, epoch: int, logs: dict[str, Any] | None
    ) -> tuple[dict[str, list[Any]], list[int]]:
        """Return History's values and epochs, with those of an epoch that just ended."""
        given = self.model.history
        plain = _callback_state.plain_all
        history = {name: plain(values) for name, values in given.history.items()}
        epochs = [*map(int, given.epoch)]
        if logs is not None and epoch - 1 not in epochs:  # Keras calls History after this callback
            epochs.append(epoch - 1)
            for name, value in logs.items():
                history.setdefault(name, []).append(plain(value))
        return history, epochs

    def _write(self, state: checkpoints.TrainingState) -> str | None:
        """Write a state; return a warning if it cannot be written."""
        directory = self._checkpoints.directory
        try:
            other = atomic_files.taken_over(self._lock)
            if other is None:
                self._checkpoints.save(state)
        except OSError as error:
            return (  # each failure has a text of its own, as Python shows equal warnings once
                f"The training state of epoch {state.epoch}, step {state.step} could not be saved "
                f"in {directory} ({error.strerror or error}). Training continues; what was saved "
                "before is still there."
            )
        if other is not None:
            checks.fail(
                "Another run, which began later, keeps its state in this directory, so this one "
                "stops.",
                directory=str(directory),
                other=other,
                remedy="Use a directory of its own for each run.",
            )
        return None

    def _build(self) -> None:
        """Make all variables, by a step of training whose results the state then replaces."""
        history = self.model.history
        self.model._initial_epoch = None  # that of a `BackupAndRestore`
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several steps in an execution
            keras.Model.fit(self.model, self._data.first_batch(), shuffle=False, verbose=0)
        self.model.history = history

    def _is_to_stop(self, *, asks_now: bool = False) -> bool:
        return self._stop.is_due(_model_state.strategy_of(self.model), asks_now=asks_now)

    def _wait(self) -> None:
        """Wait until the last state is on disk, in all processes: only the first writes it."""
        background.wait(self._checkpoints.directory)
        if processes.count() > 1:
            processes.gathered([0], _model_state.strategy_of(self.model))

    def _leave(self) -> None:
        self._wait()  # a launcher may stop all processes when one exits
        atomic_files.release(self._lock)
        by_ctrl_c = self._stop.signal == signal.SIGINT
        self._stop.begin()
        by = "request_stop()" if self._signals.is_requested else "SIGTERM"
        message = (
            f"Training was stopped by {'Ctrl-C' if by_ctrl_c else by}. Its state is in "
            f"{self._checkpoints.directory}, and the same program continues from there."
        )
        if by_ctrl_c:
            self._signals.release()
            raise KeyboardInterrupt(message)
        self._signals.release_to_leave()
        sys.stderr.write(f"\n{message}\n")
        raise SystemExit(errors.STOPPED)


def _save_freq(value: str | int) -> int:
    try:
        return checks.integer("save_freq", value)
    except ValueError as error:
        raise errors.InputError(f'{error} Or pass "epoch".') from None
