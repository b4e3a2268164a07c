"""Callbacks in several processes of TensorFlow, of which only the first writes and reports."""

import tempfile
from pathlib import Path
from typing import Any

import keras

from kdpkit._internal import processes

# These only write what they are called with, so other processes do without them.
_WRITING = keras.callbacks.CSVLogger | keras.callbacks.RemoteMonitor | keras.callbacks.TensorBoard
_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # since Keras 3.14


def settings_of_this_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit`, `evaluate` or `predict` for this process.

    Only the first has callbacks that only write files, and shows progress, unless the caller sets
    `verbose`. Saving may read variables that are spread over the processes, so all of them must
    save a model together: every process saves checkpoints, and all but the first delete theirs.
    """
    callbacks = settings.get("callbacks")
    if processes.index() == 0 or isinstance(callbacks, keras.callbacks.CallbackList):
        return settings
    callbacks = keras.tree.flatten(callbacks or ())
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            _delete_files(callback)
        elif isinstance(callback, _ORBAX):
            _write_nothing(callback)
    kept = [callback for callback in callbacks if not isinstance(callback, _WRITING)]
    verbose = settings.get("verbose", "auto")
    return settings | {"callbacks": kept, "verbose": 0 if verbose == "auto" else verbose}


def _delete_files(checkpoint: keras.callbacks.ModelCheckpoint) -> None:
    """Have a checkpoint callback of Keras delete the files that it saves."""
    set_model = type(checkpoint).set_model
    checkpoint.set_model = lambda model: set_model(checkpoint, _SavingNothing(model))


def _write_nothing(checkpoint: keras.callbacks.Callback) -> None:
    """Have a callback of Orbax read variables with the others, and save nothing."""

    def read(*_: Any, **__: Any) -> None:
        checkpoint.model.get_state_tree(value_format="numpy_array")  # The first process saves this.

    checkpoint._save_checkpoint = read


class _SavingNothing:
    """A model whose files are deleted as soon as they are saved."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)

        def save(filepath: Any, **arguments: Any) -> None:
            with tempfile.TemporaryDirectory() as directory:
                method(str(Path(directory) / Path(filepath).name), **arguments)

        return save if name in ("save", "save_weights") else method
