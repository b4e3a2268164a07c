"""Callbacks in several processes, of which only the first writes files and reports."""

import os
import tempfile
from pathlib import Path
from typing import Any

import keras

from kdpkit._internal import processes

# These only write what they are called with, so other processes do without them.
_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # since Keras 3.14


def settings_of_this_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit`, `evaluate` or `predict` for this process."""
    callbacks = settings.get("callbacks")
    if processes.index() == 0 or isinstance(callbacks, keras.callbacks.CallbackList):
        return settings
    verbose = verbosity(settings.get("verbose", "auto"))
    return settings | {"callbacks": of_this_process(callbacks), "verbose": verbose}


def verbosity(verbose: int | str) -> int | str:
    """Let only the first process show progress, unless the caller sets `verbose`."""
    return 0 if verbose == "auto" and processes.index() > 0 else verbose


def of_this_process(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Return the callbacks of this process: only the first has those that only write files.

    Saving may read variables that are spread over the processes, so all of them must save a model
    together. Every process therefore saves checkpoints, and all but the first delete theirs.
    """
    callbacks = keras.tree.flatten(callbacks or ())
    if processes.index() == 0:
        return callbacks
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            _delete_files(callback)
        elif isinstance(callback, _ORBAX):
            _write_no_shards(callback)
    return [callback for callback in callbacks if not isinstance(callback, _WRITING)]


def _delete_files(checkpoint: keras.callbacks.ModelCheckpoint) -> None:
    """Have a checkpoint callback of Keras delete the files that it saves."""
    set_model = type(checkpoint).set_model
    checkpoint.set_model = lambda model: set_model(checkpoint, SavingNothing(model))


def _write_no_shards(checkpoint: keras.callbacks.Callback) -> None:
    """Have a callback of Orbax read variables with the others, and save nothing.

    On JAX each process saves its own shards.
    """

    def read(*_: Any, **__: Any) -> None:
        checkpoint.model.get_state_tree(value_format="numpy_array")  # The first process saves this.

    if keras.backend.backend() != "jax":
        checkpoint._save_checkpoint = read


class SavingNothing:
    """A model whose files are deleted as soon as they are saved."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)

        def save(filepath: str | os.PathLike[str], **arguments: Any) -> None:
            with tempfile.TemporaryDirectory() as directory:
                method(str(Path(directory) / Path(filepath).name), **arguments)

        return save if name in ("save", "save_weights") else method
