"""What callbacks do in processes other than the first: all but writing and reporting."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import keras

from kdpkit import _processes

# These write one file from what they are told, and need nothing of the other processes.
_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def settings_of_this_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Give the arguments of `fit`, `evaluate` or `predict` as they are meant for this process."""
    if _processes.index() == 0 or isinstance(
        settings.get("callbacks"), keras.callbacks.CallbackList
    ):
        return settings
    callbacks = of_this_process(settings.get("callbacks"))
    return settings | {
        "callbacks": callbacks,
        "verbose": verbosity(settings.get("verbose", "auto")),
    }


def verbosity(verbose: Any) -> Any:
    """Let the first process alone show progress, unless the caller asked for it."""
    return 0 if verbose == "auto" and _processes.index() > 0 else verbose


def of_this_process(callbacks: Any) -> list[Any]:
    """Give the callbacks of this process: in others than the first those that do not only write.

    All processes must save a model together, since saving may read what is spread over them; so
    checkpoints are written everywhere, and elsewhere than in the first process dropped.
    """
    callbacks = keras.tree.flatten(callbacks or ())
    if _processes.index() == 0:
        return callbacks
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            _drop_files(callback)
    return [callback for callback in callbacks if not isinstance(callback, _WRITING)]


def _drop_files(checkpoint: Any) -> None:
    """Give a checkpoint callback of Keras a model whose files are dropped."""
    if getattr(checkpoint, "writes_once", False):  # `kdpkit.callbacks.ModelCheckpoint`
        return
    checkpoint.set_model = functools.partial(_set_model, checkpoint)


def _set_model(checkpoint: Any, model: Any) -> None:
    type(checkpoint).set_model(checkpoint, SavingNothing(model))


class SavingNothing:
    """A model whose files are written, and dropped at once."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: str, **arguments: Any) -> None:
        """Save the model to nowhere."""
        with tempfile.TemporaryDirectory() as directory:
            self._model.save(_within(directory, filepath), **arguments)

    def save_weights(self, filepath: str, **arguments: Any) -> None:
        """Save the weights to nowhere."""
        with tempfile.TemporaryDirectory() as directory:
            self._model.save_weights(_within(directory, filepath), **arguments)


def _within(directory: str, filepath: Any) -> str:
    return os.fspath(Path(directory) / Path(filepath).name)
