"""Checkpoints whose files are complete, whatever happens while they are written."""

import contextlib
import functools
import os
import posixpath
from collections.abc import Iterator
from typing import Any

import keras

from kdpkit._internal import atomic_files, storage


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves as `keras.callbacks.ModelCheckpoint` does, but atomically.

    Keras writes to the file's final name, so a process killed meanwhile leaves a part of a file
    there, and with `save_best_only` the best model so far is lost. Here the file is written to a
    hidden name (`.model-....keras`) beside it, and moved to its name when it is complete. Until
    then the old file stays; a killed process leaves the hidden one behind, an error leaves none.

    Arguments, names of files and messages are Keras'. Works in `fit` on TensorFlow and JAX, under
    any strategy. Of several processes all save, since a model may have parts of which each holds
    its own, and the first one's file stays. In object storage, as `gs://bucket/model.keras`, the
    file is made on this machine's disk and then put there.

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((2, 1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoint = ModelCheckpoint(f"{directory}/epoch-{{epoch}}.keras")
    ...     history = model.fit(x, x, epochs=2, verbose=0, callbacks=checkpoint)
    ...     print(sorted(os.listdir(directory)))
    ['epoch-1.keras', 'epoch-2.keras']
    """

    writes_once = True  # in the first process, if there are several

    # Keras has no hook for how a file is written, but its callback saves by `self.model.save` and
    # `self.model.save_weights`. So while its own hooks run, `self.model` is one that saves
    # atomically. That takes public names alone, where overriding `_save_model` would take three
    # private methods and repeat what they do.
    _in_hook = False
    filepath: str  # where to save, as given

    @functools.wraps(keras.callbacks.ModelCheckpoint.__init__)  # type: ignore[misc]
    def __init__(self, filepath: str | os.PathLike[str], *args: Any, **keywords: Any) -> None:
        # Keras would take `gs:/...`, which pathlib makes of `gs://...`, for a path on this disk.
        super().__init__(os.fspath(storage.path(filepath)), *args, **keywords)

    @property
    def model(self) -> "keras.Model | _SavingAtomically":
        """The model that trains."""
        model = super().model
        return _SavingAtomically(model) if self._in_hook else model

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if `save_freq` asks for it."""
        with self._hook():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, unless `save_freq` counts batches."""
        with self._hook():
            super().on_epoch_end(epoch, logs)

    @contextlib.contextmanager
    def _hook(self) -> Iterator[None]:
        given = self.filepath
        self._in_hook = True
        if storage.is_remote(given):
            self.filepath = _RemoteName(given)
        try:
            yield
        finally:
            self._in_hook, self.filepath = False, given


class _RemoteName(str):
    """The name of a remote file, which shows as its path.

    Keras makes the directory of the file by TensorFlow alone, and where there is none in the name
    it makes none. `atomic_files.replacing` makes what is needed.
    """

    url: str

    def __new__(cls, url: str) -> "_RemoteName":
        name = super().__new__(cls, posixpath.basename(url))
        name.url = url
        return name

    def format(self, *values: Any, **fields: Any) -> "_RemoteName":
        return _RemoteName(self.url.format(*values, **fields))

    def __format__(self, spec: str) -> str:
        return format(self.url, spec)


class _SavingAtomically:
    """A model that saves its files atomically."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: str, **arguments: Any) -> None:
        with _beside(filepath) as temporary:
            self._model.save(temporary, **arguments)

    def save_weights(self, filepath: str, **arguments: Any) -> None:
        with _beside(filepath) as temporary:
            self._model.save_weights(temporary, **arguments)


@contextlib.contextmanager
def _beside(filepath: str) -> Iterator[str]:
    """Yield a path to write to for `filepath`, with an ending by which Keras knows the format."""
    path = getattr(filepath, "url", filepath)
    with atomic_files.replacing_in_first_process(path) as temporary:
        # `replacing` keeps one suffix, and of weights Keras wants both.
        ending = ".weights.h5" if filepath.endswith(".weights.h5") else temporary.suffix
        written = temporary.with_name(temporary.name + ending)
        try:
            yield os.fspath(written)
            written.replace(temporary)
        finally:
            written.unlink(missing_ok=True)
