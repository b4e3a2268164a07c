"""The callback: when a state is saved, and when it is restored."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import contextlib
import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import keras

from kdpkit import checkpoints
from kdpkit._internal import checks, optimizers, processes
from kdpkit.callbacks._resume import callback_state, data, model_state, settings, stopping
from kdpkit.checkpoints import Position

# The first may change between epochs, the second not; all others may.
_DATA_SETTINGS = ("batches_in_an_epoch", "global_batch_size", "seed", "number_of_examples")
_STATE_SETTINGS = ("optimizers", "callbacks")


class Resume(keras.callbacks.Callback):
    """Saves the state of training, and restores it when the program is started again.

    The state includes weights, optimizer, random layers, metrics, History, the given callbacks, and
    the position in the data. A run that was stopped between any two steps ends with the same
    weights as an uninterrupted one. Train on `track(dataset)`, and pass this callback last.

    A save stops training while the values are read. They are then written in the background, and
    the next save, the end of `fit` and an exit wait until they are on disk. If a state cannot be
    written, as on a full disk, a sentence reports what is on disk, and training continues.

    On SIGTERM, which clusters send to end a job, the current step (or validation) is finished, the
    state is saved, and the program exits with code 42. Ctrl-C does the same but raises
    `KeyboardInterrupt`; a second Ctrl-C ends the program at once. If one of several processes gets
    the signal, all stop before the same step (on JAX only for SIGTERM). The first process writes,
    and all must be able to read the directory.

    Args:
        directory: Directory of the states, in object storage too (`gs://bucket/run`, which has no
            locks); a new run needs an empty one.
        save_freq: `"epoch"`, or a number of batches.
        keep: Number of states to keep. A damaged one is skipped with a warning.
        callbacks: Callbacks passed to `fit` that have state: `EarlyStopping`, `ReduceLROnPlateau`,
            `ModelCheckpoint`, `SwapEMAWeights`, or others with `get_state()`, which returns plain
            values by name, and `set_state(values)`.
        verbose: 1 prints a line if the run continues, 0 does not; `"auto"` is as `fit`'s `verbose`,
            and 1 in a loop of your own.

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

    async_safe = True  # On JAX nothing here makes Keras wait for a step that is not saved.

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_freq: str | int = "epoch",
        keep: int = 3,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: int | str = "auto",
    ) -> None:
        super().__init__()
        checks.backend("`Resume`", "tensorflow", "jax")
        if save_freq != "epoch":
            if isinstance(save_freq, str):
                checks.fail(
                    '`save_freq` must be "epoch" or a number of batches.', save_freq=save_freq
                )
            save_freq = checks.integer("save_freq", save_freq)
        self.save_freq = save_freq
        self._most_unsaved = math.inf if save_freq == "epoch" else float(save_freq)
        self.callbacks = keras.tree.flatten(callbacks or ())
        for callback in self.callbacks:
            callback_state.state_of(callback)  # This raises for an unknown kind.
        self.verbose = checks.one_of("verbose", verbose, ("auto", 0, 1))
        self._checkpoints = checkpoints.CheckpointDirectory(directory, keep=keep)
        self._data: Any = None  # the tracked data, once `track` was called
        self._stop = stopping.AgreedStop()
        # The program's calls of `fit`.
        self._finished_calls: list[dict[str, Any]] = []
        self._end_position: Position | None = None  # of the state with which the last one ended
        self._epochs_ahead: int | None = None  # the data's epoch minus Keras', once known
        # This call of `fit`.
        self._state: checkpoints.TrainingState | None = None  # the newest one, until it is restored
        self._setup: dict[str, Any] = {}  # settings of the program
        self._changed: dict[str, Any] = {}  # those of them that differ from the state's
        self._is_current = False  # whether the last call ended with that state
        self._earlier_end: dict[str, Any] | None = None  # how an earlier run ended this call
        self._has_begun = False
        self._ignored_warnings = contextlib.ExitStack()
        # This epoch.
        self._steps_before = 0  # batches that an earlier run trained
        self._position = Position(0, 0)  # where training is once its present step has ended
        self._saved_position: Position | None = None
        self._unsaved = 0  # batches since the last save, of earlier epochs too

    def track(self, dataset: Any) -> Any:
        """Return a dataset to train on instead of this one, which can start at any batch.

        - A `tf.data.Dataset`: what `kdpkit.pipelines.train_pipeline` returned, without further
          stages, or any other whose order is reproducible: with seeds and stateless random numbers.
          Epoch E is the E-th iteration of a new dataset, whoever else iterates it.
        - A `keras.utils.PyDataset`, such as `kdpkit.batches.ArrayBatches`, for
          `fit(shuffle=False)`: `on_epoch_end` is called once for every completed epoch, and its
          `epoch` attribute, if it has one, is set. It is read without `workers`.

        What never ends, or does not know its length, needs `fit(steps_per_epoch=...)`: an epoch
        continues where the last one stopped, and only its end is saved, on SIGTERM too. More is in
        docs/how_to/resume.md.

        Raises:
            ValueError: It is none of these, or its order is not reproducible; the message names the
                stage.
        """
        self._data = data.tracked(dataset)
        return self._data.dataset

    def request_stop(self) -> None:
        """Save the state before the next step and exit with code 42, as after SIGTERM.

        For programs that get no signal, such as a notebook, or Ray, whose training is not in the
        main thread. It may be called from any thread, in any of several processes; `SystemExit` is
        raised where `fit` was called. Before training it has no effect.

        >>> import tempfile
        >>> Resume(tempfile.mkdtemp()).request_stop()
        """
        self._stop.request()

    @property
    def initial_epoch(self) -> int:
        """The epoch with which a loop of your own begins, after `on_train_begin`; 0 in a new run.

        `fit` reads it itself.
        """
        return getattr(self.model, "_initial_epoch", None) or 0

    @property
    def _model_state(self) -> model_state.ModelState:
        return model_state.ModelState(self.model, self.params.get("metrics", ()))

    @property
    def _strategy(self) -> Any:
        return model_state.strategy_of(self.model)

    @property
    def _steps_per_epoch(self) -> int:
        return self._data.batches_per_epoch or self.params["steps"]

    @property
    def _steps_per_execution(self) -> int:
        return self.model.steps_per_execution

    def _position_in_data(self, position: Position) -> Position:
        """Return where the data are at a position of training; data that never end are in epoch 0.

        The last execution of an epoch is as long as the others.
        """
        epoch = position.epoch + (self._epochs_ahead or 0)
        if self._data.batches_per_epoch is not None:
            return Position(epoch, position.step)
        execution = self._steps_per_execution
        executions = math.ceil(self._steps_per_epoch / execution)
        return Position(0, epoch * executions * execution + position.step)

    # The start of training.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the newest state, and restore it if it is of the end of an epoch."""
        self._ignored_warnings.close()  # An earlier training may have failed.
        if self._data is None:
            checks.fail(
                "`Resume` does not know the dataset; train on `resume.track(dataset)`. Of arrays "
                "`kdpkit.batches.ArrayBatches` makes a dataset (docs/how_to/resume.md)."
            )
        if getattr(self.model, "history", None) is None:
            checks.fail("`Resume` saves History: pass `add_history=True` to `CallbackList`.")
        if not optimizers.all_of(self.model):
            warnings.warn(
                "The model has no optimizer: what only your loop holds is not saved. Pass it to "
                "`model.compile`, or make it an attribute of the model.",
                stacklevel=2,
            )
        steps, length = self.params.get("steps"), self._data.batches_per_epoch
        if (steps is None) if length is None else (steps not in (None, length)):
            checks.fail(
                "`Resume` counts complete epochs: pass `steps_per_epoch` to `fit` if the dataset "
                "never ends or does not know its length, and only then.",
                steps_per_epoch=steps,
                batches_in_the_dataset=length,
            )
        if processes.index() == 0:
            self._checkpoints.acquire()
        self._setup = self._settings(begins=True)
        state = self._checkpoints.latest()
        if state and "setup" not in state.notes:
            directory = str(self._checkpoints.directory)
            checks.fail("The states in this directory are none of `Resume`.", directory=directory)
        processes.require_equal(
            "The newest state, by epoch and step,",
            dataclasses.astuple(state.position) if state else (-1, -1),
            remedy="Use a directory that all of them see.",
            strategy=self._strategy,
        )
        self._state, self._has_begun, self._earlier_end = state, False, None
        if state:
            self._begin_after(state)
        else:
            self._epochs_ahead = None
            self._data.start()
        self._stop.begin()

    def _begin_after(self, state: checkpoints.TrainingState) -> None:
        position, epochs = state.position, self.params["epochs"]
        # The state may be of a later call of the program, and then knows how this one ended.
        ends = state.notes["ends"][len(self._finished_calls) :][:1]
        ends = [end for end in ends if end["stopped"] or end["epoch"] >= epochs]
        self._earlier_end = ends[0] if ends else None
        self._is_current = self._end_position == position
        was_stopped = state.notes["stopped"] and not self._is_current
        is_over = bool(was_stopped or ends or position.epoch >= epochs)
        self._epochs_ahead = state.notes["epochs_ahead"]
        # Keras reads the first epoch from this attribute, for `BackupAndRestore`: after
        # `on_train_begin`, in `fit` of keras/src/backend/*/trainer.py.
        self.model._initial_epoch = epochs if is_over else position.epoch
        if ends:  # A later call restores the state.
            # Programs set the rate of a call relative to what the one before has reached.
            settings.restore_rates(optimizers.all_of(self.model), ends[0]["rates"])
            if not self._finished_calls:
                warnings.warn(
                    "This call of `fit` was completed in an earlier run and trains nothing: until "
                    "the run continues the model is as the program built it, and what is computed "
                    "from it, as by `evaluate`, or saved differs.",
                    stacklevel=3,
                )
            return
        if not self._is_current:
            self._check_settings(state)
            self._model_state.build(state, self._data.first_batch)
        if position.step == 0 or is_over:
            self._restore(state)
        if is_over:
            self.model.stop_training = was_stopped
            warnings.warn(
                f"Nothing is left to train: the run in {self._checkpoints.directory} ended after "
                f"{position.epoch} of {epochs} epochs. To train on, pass more `epochs`, or, if a "
                "callback stopped it, call `fit` once more; for another run, use another "
                "directory.",
                stacklevel=3,
            )
            if not was_stopped and position != Position(epochs, 0):
                return
            self._end_position = position
        if not (self._is_current and self._data.counts_calls):
            self._data.move_to(self._position_in_data(position))
        verbose = self.params.get("verbose", 1) if self.verbose == "auto" else self.verbose
        if verbose and processes.index() == 0 and not (is_over or self._is_current):
            sys.stdout.write(
                f"Continuing the run in {self._checkpoints.directory}: epoch {position.epoch + 1} "
                f"of {epochs}, after {position.step} of {self._steps_per_epoch} steps.\n"
            )

    def _settings(self, *, begins: bool = False) -> dict[str, Any]:
        """Return the settings of the program that are compared with those of a state."""
        names = ("monitor", "mode")
        others = {
            "callbacks": [
                [type(one).__name__, *(getattr(one, name, None) for name in names)]
                for one in self.callbacks
            ],
            "batches_in_an_epoch": self._steps_per_epoch,
            "global_batch_size": self._data.global_batch_size,
            "seed": self._data.seed,
            "number_of_examples": self._data.num_examples,
        }
        of_optimizers = settings.of_program(optimizers.all_of(self.model), begins=begins)
        return of_optimizers | {name: settings.plain(value) for name, value in others.items()}

    def _check_settings(self, state: checkpoints.TrainingState) -> None:
        """Raise for settings that a state cannot be continued with; report other changed ones."""
        saved = state.notes["setup"]
        self._changed = {n: v for n, v in self._setup.items() if saved.get(n) != v}
        is_inside = state.position.step or self._data.batches_per_epoch is None
        fixed = _STATE_SETTINGS + _DATA_SETTINGS if is_inside else _STATE_SETTINGS
        for name in self._changed.keys() & {*fixed}:
            checks.fail(
                f"The saved state is of a run in which `{name.replace('_', ' ')}` differs.",
                saved=saved[name],
                **{name: self._changed[name]},
                remedy="Continue with the saved setting, or use another directory.",
            )

    def _restore(self, state: checkpoints.TrainingState) -> None:
        if not self._is_current:
            self._model_state.restore(state, self._changed)
            self._settings()  # What was restored now is none of the program's settings.
            saved = state.notes["setup"]
            pairs = (f"{n}={v!r} (saved: {saved.get(n)!r})" for n, v in self._changed.items())
            if self._changed:
                warnings.warn(
                    f"The program has other settings than the run that it continues, in "
                    f"{self._checkpoints.directory}, and trains with its own: {', '.join(pairs)}.",
                    stacklevel=4,
                )
        for index, values in enumerate(state.notes["callbacks"]):
            prefix = f"callback.{index}."
            weights = [array for name, array in state.arrays.items() if name.startswith(prefix)]
            callback_state.set_state(self.callbacks[index], values, weights)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from here; in the first epoch of a resumed run, restore the state."""
        self._steps_before, self._end_position, self._saved_position = 0, None, None
        if self._epochs_ahead is None:
            self._epochs_ahead = self._data.first_epoch - epoch
        if self._has_begun:
            self._data.begin_epoch(self._position_in_data(Position(epoch, 0)).epoch)
        else:
            self._has_begun, self._unsaved = True, 0
            self._begin_first_epoch()
        self._settings()  # Training may fail, and start again in this process.
        self._position = Position(epoch, self._steps_before)

    def _begin_first_epoch(self) -> None:
        """Continue in this epoch, which other callbacks have begun."""
        state = self._restore_history()
        if state and state.position.step:
            # Not before: `LearningRateScheduler` and others set the rate when an epoch begins, and
            # the state has the rate that this epoch had reached.
            self._restore(state)
            self._steps_before = state.position.step
            # The rest of an epoch is shorter than an epoch: keras-team/keras#23360
            self._ignored_warnings.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        elif state:
            # The start of training may have reset a callback after it was restored.
            for callback, values in zip(self.callbacks, state.notes["callbacks"], strict=True):
                if callback_state.was_reset(callback, values):
                    checks.fail(
                        "`Resume` must be the last callback: one after it forgot what was "
                        "restored.",
                        callback=type(callback).__name__,
                        remedy="Call `fit(callbacks=[..., resume])`.",
                    )

    def _restore_history(self) -> checkpoints.TrainingState | None:
        """Restore History, which Keras has just reset; return the state the first time."""
        state, self._state = self._state, None
        if state:
            self.model._initial_epoch = None  # Keras has read it; the next training starts at 0.
            values = state.notes["history"]
            end = self._earlier_end or {"epoch": math.inf, "lengths": dict.fromkeys(values)}
            history, lengths = self.model.history, end["lengths"]
            history.epoch = [epoch for epoch in state.notes["epochs"] if epoch < end["epoch"]]
            history.history = {
                name: values[name][: lengths[name]] for name in values if name in lengths
            }
        return state

    # Training.

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if a save is due; `on_epoch_end` saves the end of an epoch."""
        position = Position(self._position.epoch, self._steps_before + batch)
        if position.step >= self._steps_per_epoch:
            # docs/upstream/keras_begins_a_batch_too_many.py: this ends the epoch for Keras.
            raise StopIteration
        if batch and not self._data.was_read:
            checks.fail("`fit` trains on another dataset; pass it `resume.track(dataset)`.")
        if self._data.batches_per_epoch is not None:
            # An epoch of data that never end is not saved inside: Keras cannot train its rest.
            stops = self._stop.is_due(self._strategy)
            if stops or self._unsaved >= self._most_unsaved:
                self._save(position)
            if stops:
                self._leave()
        steps = self._steps_per_execution
        self._unsaved += steps
        end = min(position.step + steps, self._steps_per_epoch)
        self._position = Position(position.epoch, end)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save an epoch that a callback cut short, before its validation resets the metrics."""
        if self._has_begun and self.model.stop_training:  # An `evaluate` may use this callback.
            self._save_inside_epoch()

    def _save_inside_epoch(self) -> None:
        is_inside = self._position.step < self._steps_per_epoch
        can_continue = self._data.batches_per_epoch is not None
        if is_inside and can_continue and self._saved_position != self._position:
            self._save(self._position)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._ignored_warnings.close()
        stops = self._stop.is_due(self._strategy, at_once=True)
        if self._position.step >= self._steps_per_epoch:
            is_last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
            is_due = self.save_freq == "epoch" or self._unsaved >= self._most_unsaved
            if stops or is_last or is_due:
                self._end_position = Position(epoch + 1, 0)
                self._save(self._end_position, logs)
        else:
            self._save_inside_epoch()
        if stops:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait until the last state is on disk, and report it if that failed."""
        self._restore_history()  # if no epoch was left to train
        self._has_begun = False
        self._settings()
        history = self.model.history
        end = {
            "epoch": 1 + max(history.epoch, default=-1),
            "stopped": bool(self.model.stop_training),
            "lengths": {name: len(values) for name, values in history.history.items()},
            "rates": settings.rates(optimizers.all_of(self.model)),
        }
        self._finished_calls.append(self._earlier_end or end)
        if self._wait() and processes.index() == 0:
            processes.report(f"The end of training is not saved. {self._newest_state()}")
        self._checkpoints.release()
        self._stop.end()

    # Saving.

    def _save(self, position: Position, logs: dict[str, Any] | None = None) -> None:
        """Save the state at a position, with the logs of an epoch that just ended."""
        self._unsaved, self._saved_position = 0, position
        self._checkpoints.wait()  # so that memory has one state at a time
        # Every process reads, because some values are sums over the processes.
        arrays = self._model_state.values(with_metrics=position.step > 0)
        self._settings()
        if processes.index() > 0:
            return
        states = [callback_state.state_of(callback) for callback in self.callbacks]
        for index, (_, weights) in enumerate(states):
            arrays |= {f"callback.{index}.{i}": weight for i, weight in enumerate(weights)}
        history = callback_state.plain(self.model.history.history)
        epochs, epoch = [*map(int, self.model.history.epoch)], position.epoch - 1
        if logs is not None and epoch not in epochs:  # Keras calls History after this callback.
            epochs.append(epoch)
            for name, value in logs.items():
                history.setdefault(name, []).append(callback_state.plain(value))
        notes = {
            "setup": self._setup,
            "stopped": bool(self.model.stop_training) and position.step == 0,
            "history": history,
            "epochs": epochs,
            "callbacks": [values for values, _ in states],
            "epochs_ahead": self._epochs_ahead,
            "ends": [*self._finished_calls],
            "trained": self._model_state.trained(),
        }
        state = checkpoints.TrainingState(position=position, arrays=arrays, notes=notes)
        self._checkpoints.save_in_background(state)

    def _wait(self) -> bool:
        """Wait in all processes for the first one's last save; return whether it failed."""
        self._checkpoints.wait()
        if processes.count() == 1:
            return self._checkpoints.is_failing
        return bool(processes.gathered([self._checkpoints.is_failing], self._strategy).any())

    def _newest_state(self) -> str:
        directory, newest = self._checkpoints.directory, self._checkpoints.newest
        if newest is None:
            return f"{directory} has no complete state: the same program starts from its beginning."
        return (
            f"The last complete state in {directory} is of {newest}, and the same program continues"
            " from there."
        )

    def _leave(self) -> None:
        has_failed = self._wait()  # A launcher may stop all processes when one exits.
        self._checkpoints.release()
        directory = self._checkpoints.directory
        outcome = f"Its state is in {directory}, and the same program continues from there."
        if has_failed:
            outcome = "Its state could not be saved."
            outcome += f" {self._newest_state()}" * (processes.index() == 0)
        self._stop.leave(outcome)
