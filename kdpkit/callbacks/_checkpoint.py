"""Checkpoints that are written atomically."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from kdpkit._internal import atomic_files, storage


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves like `keras.callbacks.ModelCheckpoint`, but atomically.

    Keras writes to the final name, so a process that is killed while saving leaves a truncated
    file, and with `save_best_only` the best model so far is lost. Here the file is written to a
    hidden name (`.model-....keras`) in the same directory and renamed when it is complete. Until
    then the old file stays. A killed process leaves the hidden file, an error does not.

    Arguments, file names and messages are Keras'. Works in `fit` on TensorFlow and JAX, under any
    strategy. With several processes all take part in saving, since each may hold parts of the
    model, and the first one's file is kept. For object storage, such as `gs://bucket/model.keras`,
    the file is written to a temporary directory, which messages name, and then uploaded.

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

    writes_once = True  # only in the first of several processes

    # Keras has no hook for how a file is written, but its callback saves with `self.model.save` and
    # `self.model.save_weights`. So while its hooks run, `self.model` is a wrapper that saves
    # atomically. This only uses public names; overriding `_save_model` would need three private
    # methods and duplicate their code.
    _in_hook = False
    filepath: str  # where to save, as given

    @functools.wraps(keras.callbacks.ModelCheckpoint.__init__)  # type: ignore[misc]
    def __init__(self, filepath: str | os.PathLike[str], *args: Any, **keywords: Any) -> None:
        # pathlib turns `gs://...` into `gs:/...`, which Keras would treat as a local path.
        super().__init__(os.fspath(storage.path(filepath)), *args, **keywords)

    @property
    def model(self) -> "keras.Model | _SavingAtomically":
        """The model in training."""
        model = super().model
        return _SavingAtomically(model) if self._in_hook else model

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if `save_freq` is due."""
        with self._hook():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, unless `save_freq` counts batches."""
        with self._hook():
            super().on_epoch_end(epoch, logs)

    @contextlib.contextmanager
    def _hook(self) -> Iterator[None]:
        given, self._in_hook = self.filepath, True
        try:
            with _uploading(given) as self.filepath:
                yield
        finally:
            self._in_hook, self.filepath = False, given


@contextlib.contextmanager
def _uploading(filepath: str) -> Iterator[str]:
    """Yield where Keras saves on this machine, and put what it saves there to object storage."""
    if not storage.is_remote(filepath):
        yield filepath
        return
    scheme, _, rest = filepath.partition("://")
    with tempfile.TemporaryDirectory() as directory:
        yield f"{directory}/{rest.lstrip('/')}"
        for file in Path(directory).rglob("*"):
            if file.is_file():
                storage.RemotePath(f"{scheme}://", file.relative_to(directory)).upload(file)


class _SavingAtomically:
    """A model that saves its files atomically."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: str, **arguments: Any) -> None:
        with _beside(filepath) as temporary, _readable(self._model):
            self._model.save(temporary, **arguments)

    def save_weights(self, filepath: str, **arguments: Any) -> None:
        with _beside(filepath) as temporary, _readable(self._model):
            self._model.save_weights(temporary, **arguments)


def _readable(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Let variables be read of which, on JAX, other processes hold parts."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    from kdpkit import sharding

    return sharding.gathered_on_read(model)


@contextlib.contextmanager
def _beside(filepath: str) -> Iterator[str]:
    """Yield a temporary path with the suffix of `filepath`, which tells Keras the format."""
    with atomic_files.replacing_in_first_process(filepath) as temporary:
        # `replacing` keeps one suffix, but Keras needs both for weights.
        ending = ".weights.h5" if filepath.endswith(".weights.h5") else temporary.suffix
        written = temporary.with_name(temporary.name + ending)
        try:
            yield os.fspath(written)
            written.replace(temporary)
        finally:
            written.unlink(missing_ok=True)
