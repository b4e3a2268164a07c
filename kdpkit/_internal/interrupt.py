"""Ctrl-C during training: it ends between two steps, with what was learned kept."""

# ruff: noqa: T201, ARG002 the recipes' voice; Keras calls its hooks with arguments

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping

import keras

from kdpkit._internal import atomic_files, processes, signal_handlers, storage


class StopOnInterrupt(keras.callbacks.Callback):
    """Raises the `KeyboardInterrupt` of the first Ctrl-C where the model's state is complete.

    That is before the next training step. During validation it is at its end, which comes with the
    current batch, as on JAX an exception inside `evaluate` would destroy the weights. It does not
    set `stop_training`: Keras would then validate, and checkpointing callbacks would take the epoch
    for complete. The second Ctrl-C, and one while there is no training, raise at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False  # at a point where the model is complete
        self._asked = False
        self._training = False

    def handle_signal(self, *_: object) -> None:
        """Note a Ctrl-C (a handler for `signal.signal`)."""
        if self._asked or not self._training:
            raise KeyboardInterrupt
        self._asked = True
        # Not `print`: Keras may be writing its progress to the same buffer at this moment.
        os.write(2, b"\nCtrl-C: training ends with this step. Press it again to stop at once.\n")

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Begin to hold the first Ctrl-C back."""
        self._training = True

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Stop before the next step."""
        self._stop_if_asked()

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Let validation end with this batch."""
        if self._asked:
            self.model.stop_evaluating = True

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Stop before anything takes the results of a part for those of the complete validation."""
        self._stop_if_asked()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Stop after training, if that is when Ctrl-C came."""
        self._training = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._asked and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def saving(model: keras.Model, log_dir: storage.AnyPath | None) -> Iterator[StopOnInterrupt]:
    """Do what `kdpkit.experiment.saving_on_interrupt` documents."""
    stop = StopOnInterrupt()
    with signal_handlers.handling(stop.handle_signal, signal.SIGINT):
        try:
            yield stop
        except KeyboardInterrupt as interrupt:
            message = str(interrupt)  # by `Resume`, which has saved the state of training
            text = message or f"Training was stopped by Ctrl-C. {_save(model, log_dir, stop)}"
            print(f"\n{text}")
            raise


def _save(model: keras.Model, log_dir: storage.AnyPath | None, stop: StopOnInterrupt) -> str:
    if not stop.stopped:
        return "Nothing was saved, as it was not between two steps."
    if log_dir is None:
        return "Nothing was saved; with a log directory (--log-dir) the model would have been."
    if processes.index() > 0:
        return "The first process saves the model."
    path = log_dir / "interrupted.keras"
    with atomic_files.replacing(path) as temporary:
        model.save(temporary)
    return f"The model as trained so far is saved as {path}."
