"""The callbacks of processes other than the first, which neither write nor report."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kdpkit._internal import processes

# These write one file from their arguments, and need nothing of the other processes.
_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # since Keras 3.14


def settings_of_this_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit`, `evaluate` or `predict` as they are meant for this process."""
    callbacks = settings.get("callbacks")
    if processes.index() == 0 or isinstance(callbacks, keras.callbacks.CallbackList):
        return settings
    verbose = verbosity(settings.get("verbose", "auto"))
    return settings | {"callbacks": of_this_process(callbacks), "verbose": verbose}


def verbosity(verbose: int | str) -> int | str:
    """Let the first process alone show progress, unless the caller asked for it."""
    return 0 if verbose == "auto" and processes.index() > 0 else verbose


def of_this_process(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Return the callbacks of this process: in others than the first those that do not only write.

    All processes must save a model together, since saving may read what is spread over them; so
    every process writes checkpoints, and those of others than the first are dropped.
    """
    callbacks = keras.tree.flatten(callbacks or ())
    if processes.index() == 0:
        return callbacks
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            _drop_files(callback)
        elif isinstance(callback, _ORBAX):
            _write_no_shards(callback)
    return [callback for callback in callbacks if not isinstance(callback, _WRITING)]


def _drop_files(checkpoint: keras.callbacks.ModelCheckpoint) -> None:
    """Set a model whose files are dropped, in a checkpoint callback of Keras."""
    set_model = type(checkpoint).set_model
    checkpoint.set_model = lambda model: set_model(checkpoint, SavingNothing(model))


def _write_no_shards(checkpoint: keras.callbacks.Callback) -> None:
    """Let a callback of Orbax only read with the others, except on JAX, where each has shards."""

    def read(*_: Any, **__: Any) -> None:
        checkpoint.model.get_state_tree(value_format="numpy_array")  # as the first process does

    if keras.backend.backend() != "jax":
        checkpoint._save_checkpoint = read


class SavingNothing:
    """A model whose files are written, and dropped at once."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)
        writes = name in ("save", "save_weights")
        return functools.partial(_save_nowhere, method) if writes else method


def _save_nowhere(save: Callable, filepath: str | os.PathLike[str], **arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save(str(Path(directory) / Path(filepath).name), **arguments)
