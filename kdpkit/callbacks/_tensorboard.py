"""TensorBoard event files with the applied learning rate, on TensorFlow and JAX."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import numbers
import os
from collections import deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import keras

from kdpkit._internal import checks, processes, storage
from kdpkit.callbacks import _hyperparameters
from kdpkit.callbacks._devices import is_reading
from kdpkit.callbacks._learning_rate import (
    AppliedRateCallback,
    batches_counted,
    is_keras_optimizer,
)
from kdpkit.callbacks._mirror import Mirror
from kdpkit.callbacks._throughput import batches_ended

_RUN = ""  # the run's directory itself, which contains those of training and validation


class TensorBoard(AppliedRateCallback):
    """Writes Keras' TensorBoard scalars, with the applied learning rate.

    Tags and runs are those of `keras.callbacks.TensorBoard`, with two differences:
    `epoch_learning_rate` is the rate of the epoch's last update, where Keras writes the next
    step's; and scalars only need the package `tensorboard`, so they work on JAX too and no step
    waits for them. All logs are written; callbacks that add to them (`Throughput`, `DeviceMonitor`)
    must be earlier in the list, as in `training_callbacks`. With several processes only the first
    one writes.

    Args:
        log_dir: Directory of the event files, created if needed, for `tensorboard --logdir`. In
            object storage (`gs://bucket/logs`), which cannot append, files are replaced at the end
            of every epoch.
        run_name: The run's directory inside `log_dir`, to compare several; None uses `log_dir`.
        hyperparameters: Settings of the run by name: numbers and strings, and mappings or
            dataclasses of them, such as a `kdpkit.scaling.ScalePlan`. The HParams page compares
            runs by them, and the text page shows them as the table `hyperparameters`.
        update_freq: `"epoch"`, `"batch"`, or an integer N to also write the logs of every Nth
            batch, at the number of batches seen.
        **drawn_by_keras: `histogram_freq`, `write_graph` (off unless asked for), `write_images`,
            `profile_batch` and `embeddings_...` as in Keras, whose callback writes them as a run
            named `drawings`. They need the TensorFlow backend.

    Raises:
        ValueError: An argument is invalid or needs TensorFlow, or `log_dir` is not a writable
            directory (also an `OSError`).
        ImportError: The package `tensorboard` is not installed.

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((4, 1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     board = TensorBoard(directory, run_name="first")
    ...     history = model.fit(x, x, verbose=0, callbacks=board)
    ...     print(os.listdir(f"{directory}/first"))
    ['train']
    """

    _rate_is_optional = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        *,
        run_name: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        update_freq: str | int = "epoch",
        **drawn_by_keras: Any,
    ) -> None:
        super().__init__()
        _writer_class()
        if not isinstance(log_dir, (str, os.PathLike)):
            checks.fail("`log_dir` must be the path of a directory.", log_dir=log_dir)
        self.log_dir = os.fspath(storage.path(log_dir))
        self.run_name = _run_name(run_name)
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            checks.fail(
                "`hyperparameters` must be values by name.", hyperparameters=hyperparameters
            )
        self.hyperparameters = hyperparameters
        self.update_freq = update_freq
        if update_freq != "epoch":
            every = 1 if update_freq == "batch" else update_freq
            self._batches_between = checks.integer("update_freq", every)
        path = storage.path(log_dir) / (run_name or "")
        self._run_dir = os.fspath(path)
        self._drawings = _drawings(self._run_dir, drawn_by_keras)
        self._mirror: Mirror | None = None
        if _is_writer():
            storage.make_writable(path)  # now, so errors are raised before data are prepared
            self._mirror = Mirror(path) if isinstance(path, storage.RemotePath) else None
        else:
            self._drawings = keras.callbacks.Callback()
        self._writers: dict[str, Any] = {}
        self._in_fit = False
        # Batch logs, which may come from other threads; tensorboard's writer is not thread-safe.
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        # The optimizer's number of batches at the start of the epoch and at the latest log.
        self._batches_before = self._batches_seen = 0

    def set_model(self, model: keras.Model) -> None:
        """Set the model; Keras writes its graph if requested."""
        super().set_model(model)
        self._drawings.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Open the training run's file, so a full disk is detected before training."""
        super().on_train_begin(logs)
        self._in_fit = True
        self._waiting.clear()  # left by an interrupted `fit`
        self._batches_seen = batches_counted(self.model.optimizer)
        if _is_writer():
            self._writer("train")
            self._write_hyperparameters()
        self._flush()
        self._drawings.on_train_begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Continue to count batches from the previous epoch."""
        super().on_epoch_begin(epoch, logs)
        self._batches_before = self._batches_seen

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the batch logs received so far."""
        super().on_train_batch_begin(batch, logs)
        self._write_batches()
        self._drawings.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Store the batch's logs for writing."""
        super().on_train_batch_end(batch, logs)
        if self.update_freq != "epoch":
            seen = self._batches_before + batches_ended(batch, self.params)
            self._waiting.append((seen, dict(logs or {})))
        self._drawings.on_train_batch_end(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the epoch's logs with the rate of its last update."""
        self._write_batches()
        scalars = dict(logs or {})
        if self._has_rate:
            scalars["learning_rate"] = self._applied_rate()
        for name, value in scalars.items():
            self._write(*_run_and_tag(name), value, epoch)
        self._flush()
        self._drawings.on_epoch_end(epoch)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write the results of `evaluate`, inside or outside `fit`, at the optimizer's step."""
        optimizer = self.model.optimizer
        if is_keras_optimizer(optimizer):
            updates = int(keras.ops.copy(optimizer.iterations))
            for name, value in (logs or {}).items():
                tag = f"evaluation_{name}_vs_iterations"
                self._write("validation", tag, value, updates)
        self._flush()
        if not self._in_fit:
            self._close()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the files."""
        self._in_fit = False
        if _RUN in self._writers:
            self._writers[_RUN].add_event(_hyperparameters.end_event())
        self._close()
        self._drawings.on_train_end()

    def _write_hyperparameters(self) -> None:
        """Write them where TensorBoard expects them: in the parent directory of the curves."""
        if self.hyperparameters:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            writer = self._writers[_RUN] = EventFileWriter(self._directory())
            values = _hyperparameters.flattened(self.hyperparameters)
            for event in _hyperparameters.begin_events(values):
                writer.add_event(event)

    def _write_batches(self) -> None:
        while self._waiting:
            seen, logs = self._waiting.popleft()
            self._batches_seen = max(self._batches_seen, seen)
            at_once = self._batches_at_once or seen - self._batches_before
            if seen % self._batches_between < at_once:  # they include an Nth batch
                for name, value in logs.items():
                    self._write("train", f"batch_{name}", value, seen)

    def _write(self, run: str, tag: str, value: Any, step: int) -> None:
        if _is_writer() and isinstance(value, numbers.Real):
            self._writer(run).add_scalar(tag, value, step)

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            self._writers[run] = _writer_class()(f"{self._directory()}/{run}")
        return self._writers[run]

    def _directory(self) -> str:
        return os.fspath(self._mirror.local) if self._mirror else self._run_dir

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()
        if self._mirror:
            self._mirror.copy()

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        if self._mirror:
            self._mirror.copy()


def _run_name(name: Any) -> str | None:
    """Return the name of a directory inside `log_dir`, if valid."""
    if name is not None and not isinstance(name, str):
        checks.fail("`run_name` must be a string.", run_name=name)
    if name and (PurePath(name).is_absolute() or ".." in PurePath(name).parts):
        checks.fail("`run_name` must be a directory inside `log_dir`.", run_name=name)
    return name


def _run_and_tag(name: str) -> tuple[str, str]:
    """Return the run and the tag of an epoch's value."""
    if name.startswith("val_"):
        return "validation", f"epoch_{name[4:]}"
    return "train", f"device/{name}" if is_reading(name) else f"epoch_{name}"


def _is_writer() -> bool:
    return processes.index() == 0


def _writer_class() -> Any:
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise ImportError(
            "TensorBoard's event files are written by the package `tensorboard`, which cannot be "
            f"imported ({error}). Install it with `pip install tensorboard`."
        ) from error
    return Writer


def _drawings(run_dir: str, arguments: dict[str, Any]) -> keras.callbacks.Callback:
    """Return Keras' callback for everything except scalars, or an empty one if not needed."""
    wanted = {name: value for name, value in arguments.items() if value}
    if not wanted:
        return keras.callbacks.Callback()
    if keras.backend.backend() != "tensorflow":
        checks.fail(
            f"{', '.join(f'`{name}`' for name in wanted)} is drawn by TensorFlow, and this is the "
            f"{keras.backend.backend()} backend.",
            **wanted,
            remedy="Leave it out; scalars are written on every backend.",
        )
    storage.require_tensorflow(run_dir)
    # In a separate directory: TensorBoard only follows the newest file of a directory.
    return keras.callbacks.TensorBoard(f"{run_dir}/drawings", **{"write_graph": False, **wanted})
