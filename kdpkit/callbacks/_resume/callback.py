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
from kdpkit._internal import checks, processes, versions
from kdpkit.callbacks._resume import callback_state, data, model_state, stopping
from kdpkit.checkpoints import Position

_OF_DATA = ("batches_in_an_epoch", "global_batch_size", "seed")  # may change between epochs


@dataclasses.dataclass
class _Call:
    """A call of `fit`, and the state with which it begins.

    Args:
        state: The newest state, until it is restored.
        end: Where this call ended, if the state is of a later call of the program.
        was_left_here: Whether the state is that with which this program's last call ended, so that
            model and data are as the program wants them.
        was_stopped: Whether a callback ended the run with this state.
        is_over: Whether nothing is left to train.
        has_begun: Whether an epoch has.
    """

    state: checkpoints.TrainingState | None = None
    end: dict[str, Any] | None = None
    was_left_here: bool = False
    was_stopped: bool = False
    is_over: bool = False
    has_begun: bool = False


class Resume(keras.callbacks.Callback):
    """Saves the state of training, and restores it when the program is started again.

    The state includes weights, optimizer, random layers, metrics, History, the given callbacks, and
    the position in the data. A run that was stopped between any two steps ends with the same
    weights as an uninterrupted one. Train on `track(dataset)`, and pass this callback last.

    A save stops training while the values are read. They are then written in the background, and
    the next save, the end of `fit` and an exit wait until they are on disk. A crash meanwhile
    leaves the state before. A state that cannot be written is reported by a warning; training
    continues.

    On SIGTERM, which clusters send to end a job, the current step (or validation) is finished, the
    state is saved, and the program exits with code 42. Ctrl-C does the same but raises
    `KeyboardInterrupt`; a second Ctrl-C ends the program at once. If one of several processes gets
    the signal, all stop before the same step (on JAX only for SIGTERM). The first process writes,
    and all must be able to read the directory. `request_stop()` does the same where no signal
    arrives, as off the main thread.

    Args:
        directory: Directory of the states, in object storage too (`gs://bucket/run`, which has no
            locks); a new run needs an empty one.
        save_freq: `"epoch"`, or a number of batches.
        keep: Number of states to keep. A damaged one is skipped with a warning.
        callbacks: Callbacks passed to `fit` that have state: `EarlyStopping`, `ReduceLROnPlateau`,
            `ModelCheckpoint`, `SwapEMAWeights`, or others with `get_state()`, which returns plain
            values by name, and `set_state(values)`.
        verbose: 1 prints a line if the run continues, 0 does not; `"auto"` is as `fit`'s `verbose`.

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

    async_safe = True  # on JAX nothing here makes Keras wait for a step that is not saved

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
        if isinstance(save_freq, str) and save_freq != "epoch":
            checks.fail(
                '`save_freq` must be "epoch" or a number of batches.',
                save_freq=save_freq,
            )
        self.save_freq = (
            save_freq if save_freq == "epoch" else checks.integer("save_freq", save_freq)
        )
        self._most_unsaved = math.inf if save_freq == "epoch" else float(self.save_freq)
        self.callbacks = keras.tree.flatten(callbacks or ())
        for callback in self.callbacks:
            callback_state.state_of(callback)  # raises for an unknown kind
        self.verbose = checks.one_of("verbose", verbose, ("auto", 0, 1))
        self._checkpoints = checkpoints.CheckpointDirectory(directory, keep=keep)
        self._data: Any = None  # a `data.Tracked`, once `track` was called
        self._stop = stopping.AgreedStop()
        # Of the program.
        self._ends: list[dict[str, Any]] = []  # of the calls of `fit` that are over
        self._left_at: Position | None = None  # of a state with which a call of `fit` ended here
        self._epochs_ahead: int | None = None  # of the data, if Keras does not count from its first
        # Of a call of `fit`.
        self._call: Any = None  # a `_Call`, or None if this is no training
        self._catching = contextlib.ExitStack()
        # Of an epoch.
        self._first = 0  # batches that an earlier run trained
        self._at = Position(0, 0)  # where training is once its present step has ended
        self._saved_at: Position | None = None
        self._unsaved = 0  # batches since the last save, of earlier epochs too
        self._continued: checkpoints.TrainingState | None = None  # until its first step
        self._drawn: dict[str, Any] = {}  # the state of torch's random numbers after its last step

    def track(self, dataset: Any) -> Any:
        """Return a dataset to train on instead of this one, which can start at any batch.

        - A `tf.data.Dataset`: what `kdpkit.pipelines.train_pipeline` returned, without further
          stages, or any other whose order is reproducible: with seeds and stateless random numbers.
          Epoch E is the E-th iteration of a new dataset, whoever else iterates it. Functions are
          traced again; stages with `deterministic=False` are in order.
        - A `keras.utils.PyDataset`, such as `kdpkit.batches.ArrayBatches`: `on_epoch_end` is called
          once for every completed epoch, and its `epoch` attribute, if it has one, is set. It is
          read without `workers`.

        What never ends, or does not know its length, needs `fit(steps_per_epoch=...)`: an epoch
        continues where the last one stopped, and only its end is saved, on SIGTERM too. Except for
        `tf.data`, `fit` needs `shuffle=False`. More is in docs/how_to/resume.md.

        Raises:
            ValueError: It is none of these, or its order cannot be had again; the message names the
                stage.

        """
        self._data = data.tracked(dataset)
        return self._data.given

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
    def _of_model(self) -> model_state.ModelState:
        return model_state.ModelState(self.model, self.params.get("metrics", ()))

    @property
    def _strategy(self) -> Any:
        return model_state.strategy_of(self.model)

    @property
    def _length(self) -> int:
        return self._data.full_length or self.params["steps"]

    def _in_data(self, position: Position) -> Position:
        """Return a position in the data, which may be one that never ends."""
        epoch = position.epoch + (self._epochs_ahead or 0)
        if self._data.full_length is not None:
            return Position(epoch, position.step)
        # `fit` has no execution of fewer steps at an epoch's end, and a loop has.
        at_once = 1 if "steps_at_once" in self.params else self.model.steps_per_execution
        return Position(0, epoch * math.ceil(self._length / at_once) * at_once + position.step)

    # Beginning.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the newest state; restore it if it is of the end of an epoch."""
        self._catching.close()  # if an earlier training failed
        if self._data is None:
            checks.fail("`Resume` does not know the dataset; train on `resume.track(dataset)`.")
        self._check_steps()
        if processes.index() == 0:
            self._checkpoints.acquire()
        state = self._checkpoints.latest()
        processes.require_equal(
            "The newest state, by epoch and step,",
            dataclasses.astuple(state.position) if state else (-1, -1),
            remedy="Use a directory that all of them see.",
            strategy=self._strategy,
        )
        self._call = self._call_after(state)
        if state:
            self._begin_after(state, self._call)
        else:
            self._epochs_ahead = None
            self._data.start()
        self._stop.begin()

    def _check_steps(self) -> None:
        steps, length = self.params.get("steps"), self._data.full_length
        if (steps is None) if length is None else (steps not in (None, length)):
            checks.fail(
                "`Resume` counts complete epochs: pass `steps_per_epoch` to `fit` if the dataset "
                "never ends or does not know its length, and only then.",
                steps_per_epoch=steps,
                batches_in_the_dataset=length,
            )

    def _call_after(self, state: checkpoints.TrainingState | None) -> _Call:
        """Return what is left of this call of `fit`, which begins with a state."""
        if state is None:
            return _Call()
        position, epochs = state.position, self.params["epochs"]
        # Where this call ended, if the state is of a later one of the program.
        ends = state.notes["ends"][len(self._ends) :][:1]
        end = next((end for end in ends if end["stopped"] or end["epoch"] >= epochs), None)
        was_left_here = self._left_at == position
        was_stopped = state.notes["stopped"] and not was_left_here
        return _Call(
            state=state,
            end=end,
            was_left_here=was_left_here,
            was_stopped=was_stopped,
            is_over=was_stopped or end is not None or position.epoch >= epochs,
        )

    def _begin_after(self, state: checkpoints.TrainingState, call: _Call) -> None:
        position, epochs = state.position, self.params["epochs"]
        self._epochs_ahead = state.notes["epochs_ahead"]
        # Keras takes the first epoch from here: `initial_epoch = self._initial_epoch or ...` after
        # `on_train_begin`, in `fit` of keras/src/backend/*/trainer.py, for `BackupAndRestore`.
        self.model._initial_epoch = epochs if call.is_over else position.epoch
        if call.end:  # a later call restores the state
            if not self._ends:
                warnings.warn(
                    "This call of `fit` was completed in an earlier run and trains nothing: until "
                    "the run continues the model is as the program built it, and what is computed "
                    "from it, as by `evaluate`, or saved differs.",
                    stacklevel=3,
                )
            return
        if not call.was_left_here:
            self._check_setup(state)
            self._of_model.build(state, self._data.first_batch)
        if position.step == 0 or call.is_over:
            self._restore(state, call)
        if call.is_over:
            self.model.stop_training = call.was_stopped
            warnings.warn(
                f"Nothing is left to train: the run in {self._checkpoints.directory} ended after "
                f"{position.epoch} of {epochs} epochs. To train on, pass more `epochs`, or, if a "
                "callback stopped it, call `fit` once more; for another run, use another "
                "directory.",
                stacklevel=3,
            )
            if not call.was_stopped and position != Position(epochs, 0):
                return
            self._left_at = position
        if not (call.was_left_here and self._data.counts_epochs):
            self._data.go_to(self._in_data(position))
        if not (call.is_over or call.was_left_here):
            self._report(position)

    def _check_setup(self, state: checkpoints.TrainingState) -> None:
        saved, present = state.notes["setup"], self._setup()
        for name, value in present.items():
            is_of_data = name in _OF_DATA and self._data.full_length is not None
            if saved[name] != value and (state.position.step or not is_of_data):
                checks.fail(
                    f"The saved state is of a run in which `{name.replace('_', ' ')}` differs.",
                    saved=saved[name],
                    **{name: value},
                    remedy="Continue with the saved setting, or use another directory.",
                )

    def _setup(self) -> dict[str, Any]:
        """Return what must stay the same to continue a run."""
        return {
            "optimizers": [type(one).__name__ for one in model_state.optimizers(self.model)],
            "callbacks": [type(callback).__name__ for callback in self.callbacks],
            "batches_in_an_epoch": self._length,
            "global_batch_size": self._data.global_batch_size,
            "seed": self._data.seed,
        }

    def _restore(self, state: checkpoints.TrainingState, call: _Call) -> None:
        if not call.was_left_here:
            self._of_model.restore(state)
        for index, values in enumerate(state.notes["callbacks"]):
            weights = [
                a for name, a in state.arrays.items() if name.startswith(f"callback.{index}.")
            ]
            callback_state.set_state(self.callbacks[index], values, weights)

    def _report(self, position: Position) -> None:
        verbose = self.params.get("verbose") if self.verbose == "auto" else self.verbose
        if processes.index() == 0 and verbose:
            sys.stdout.write(
                f"Continuing the run in {self._checkpoints.directory}: epoch {position.epoch + 1} "
                f"of {self.params['epochs']}, after {position.step} of {self._length} steps.\n"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to count; in the first epoch of a resumed run, restore the state."""
        call = self._call
        self._first, self._left_at, self._saved_at = 0, None, None
        if self._epochs_ahead is None:
            self._epochs_ahead = self._data.first_epoch - epoch
        if call.has_begun:
            self._data.begin_epoch(self._in_data(Position(epoch, 0)).epoch)
        else:
            self._unsaved = 0
        call.has_begun = True
        if state := self._restore_history(call):
            self._continue(state, call)
        self._at = Position(epoch, self._first)

    def _continue(self, state: checkpoints.TrainingState, call: _Call) -> None:
        """Continue in this epoch, which other callbacks have begun."""
        step = state.position.step
        if step:  # only now, as a schedule has just changed the rate of this epoch again
            self._restore(state, call)
            self._first, self._continued = step, state
            # The rest of an epoch is shorter than an epoch: keras-team/keras#23360
            self._catching.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        else:
            self._check_is_last(state)

    def _check_is_last(self, state: checkpoints.TrainingState) -> None:
        """Raise if a callback was reset at the begin of training, after it had been restored."""
        for callback, saved in zip(self.callbacks, state.notes["callbacks"], strict=True):
            if callback_state.was_reset(callback, saved):
                checks.fail(
                    "`Resume` must be the last callback: one after it forgot what was restored.",
                    callback=type(callback).__name__,
                    remedy="Call `fit(callbacks=[..., resume])`.",
                )

    def _restore_history(self, call: _Call) -> checkpoints.TrainingState | None:
        """Restore History, which Keras has just reset; return the state, once."""
        state, call.state = call.state, None
        if state:
            self.model._initial_epoch = None  # Keras has used it; the next training starts at 0
            history, epochs = self.model.history, state.notes["epochs"]
            until = call.end["epoch"] if call.end else math.inf
            history.epoch = [epoch for epoch in epochs if epoch < until]
            values = state.notes["history"]
            lengths = call.end["lengths"] if call.end else dict.fromkeys(values)
            history.history = {
                name: values[name][: lengths[name]] for name in values if name in lengths
            }
        return state

    # Training.

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if it is due; the end of an epoch is saved in `on_epoch_end`."""
        at, length = Position(self._at.epoch, self._first + batch), self._length
        if at.step >= length:
            # docs/upstream/keras_begins_a_batch_too_many.md: this ends the epoch for Keras.
            raise StopIteration
        if self._continued:  # only now: torch's `DataLoader` draws when an epoch is begun
            versions.restore_random_state_of_torch(self._continued.arrays)
            self._continued = None
        if batch and not self._data.is_used():
            checks.fail("`fit` trains on another dataset; pass it `resume.track(dataset)`.")
        at_once = self.params.get("steps_at_once") or self.model.steps_per_execution
        if self._data.full_length is not None:  # Keras cannot train the rest of what never ends
            stops = self._is_to_stop()
            if stops or self._unsaved >= self._most_unsaved:
                self._save(at)
            if stops:
                self._leave()
        self._unsaved += at_once
        self._at = Position(at.epoch, min(at.step + at_once, length))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note what torch has drawn in an epoch, before Keras makes a `DataLoader`, or does not."""
        if self._at.step >= self._length:
            self._drawn = versions.random_state_of_torch()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save an epoch that was cut short, before Keras resets the metrics for its validation."""
        if self._call and self.model.stop_training:  # None in an `evaluate` with this callback
            self._save_inside_an_epoch()

    def _save_inside_an_epoch(self) -> None:
        is_inside = self._at.step < self._length and self._data.full_length is not None
        if is_inside and self._saved_at != self._at:
            self._save(self._at)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the end of an epoch."""
        self._catching.close()
        versions.restore_random_state_of_torch(self._drawn)
        stops = self._is_to_stop(asks_now=True)
        if self._at.step >= self._length:
            is_last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
            is_due = self.save_freq == "epoch" or self._unsaved >= self._most_unsaved
            if stops or is_last or is_due:
                self._left_at = Position(epoch + 1, 0)
                self._save(self._left_at, logs)
        else:
            self._save_inside_an_epoch()
        if stops:
            self._leave()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait until the last state is on disk; restore History if no epoch was left."""
        call, self._call = self._call, None
        self._restore_history(call)
        history = self.model.history
        self._ends.append(
            call.end
            or {
                "epoch": 1 + max(history.epoch, default=-1),
                "stopped": bool(self.model.stop_training),
                "lengths": {name: len(values) for name, values in history.history.items()},
            }
        )
        self._wait()
        self._checkpoints.release()
        self._stop.end()

    # Saving.

    def _save(self, position: Position, logs: dict[str, Any] | None = None) -> None:
        """Save the state at a position, with the logs of an epoch that just ended."""
        self._unsaved, self._saved_at = 0, position
        self._checkpoints.wait()  # so that memory has one state at a time
        # In all processes, since some values are sums over processes.
        arrays = self._of_model.values(with_metrics=position.step > 0)
        if processes.index() > 0:
            return
        states = [callback_state.state_of(callback) for callback in self.callbacks]
        for index, (_, weights) in enumerate(states):
            arrays |= {f"callback.{index}.{i}": weight for i, weight in enumerate(weights)}
        history, epochs = self._history(position.epoch, logs)
        notes = {
            "setup": self._setup(),
            "stopped": bool(self.model.stop_training) and position.step == 0,
            "history": history,
            "epochs": epochs,
            "callbacks": [values for values, _ in states],
            "epochs_ahead": self._epochs_ahead,
            "ends": [*self._ends],
            "trained": self._of_model.trained(),
        }
        state = checkpoints.TrainingState(position=position, arrays=arrays, notes=notes)
        self._checkpoints.save_in_background(state)

    def _history(
        self, epoch: int, logs: dict[str, Any] | None
    ) -> tuple[dict[str, list[Any]], list[int]]:
        """Return History's values and epochs, with those of an epoch that just ended."""
        given = self.model.history
        plain = callback_state.plain_all
        history = {name: plain(values) for name, values in given.history.items()}
        epochs = [*map(int, given.epoch)]
        if logs is not None and epoch - 1 not in epochs:  # Keras calls History after this callback
            epochs.append(epoch - 1)
            for name, value in logs.items():
                history.setdefault(name, []).append(plain(value))
        return history, epochs

    def _is_to_stop(self, *, asks_now: bool = False) -> bool:
        return self._stop.is_due(self._strategy, asks_now=asks_now)

    def _wait(self) -> None:
        """Wait until the last state is on disk, in all processes: only the first writes it."""
        self._checkpoints.wait()
        if processes.count() > 1:
            processes.gathered([0], self._strategy)

    def _leave(self) -> None:
        self._wait()  # a launcher may stop all processes when one exits
        self._checkpoints.release()
        self._stop.leave(self._checkpoints.directory)
