"""TensorBoard event files with the applied learning rate, on TensorFlow and JAX."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import numbers
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdpkit._internal import checks, processes, storage
from kdpkit.callbacks._devices import is_reading
from kdpkit.callbacks._learning_rate import AppliedRateCallback


class TensorBoard(AppliedRateCallback):
    """Writes Keras' TensorBoard scalars, with the applied learning rate.

    Tags and runs of `fit` are those of `keras.callbacks.TensorBoard`, with two differences:
    `epoch_learning_rate` is the rate of the epoch's last update, where Keras writes the next
    step's; and scalars only need the package `tensorboard`, so they work on JAX too and no step
    waits for them. All logs are written; callbacks that add to them (`Throughput`, `DeviceMonitor`)
    must be earlier in the list, as in `training_callbacks`. With several processes only the first
    one writes.

    Args:
        log_dir: Directory of the event files, created if needed, for `tensorboard --logdir`. In
            object storage (`gs://bucket/logs`), which cannot append, files are replaced at the end
            of every epoch.
        update_freq: `"epoch"`, or after how many calls of the compiled step (`"batch"`: 1) the logs
            are written as well, as `batch_loss` and so on, with the rate of the last update as
            `batch_learning_rate`, at the optimizer's number of batches (without a single rate, the
            number of calls).

    Raises:
        ValueError: An argument is invalid, or `log_dir` is not a writable directory (also an
            `OSError`).
        ImportError: The package `tensorboard` is not installed.

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((4, 1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     board = TensorBoard(directory)
    ...     history = model.fit(x, x, verbose=0, callbacks=board)
    ...     print(os.listdir(directory))
    ['train']
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] = "logs", *, update_freq: int | str = "epoch"
    ) -> None:
        from tensorboard.summary import Writer

        super().__init__()
        if update_freq not in ("epoch", "batch"):
            checks.integer("update_freq", update_freq)
        self.update_freq: Any = 1 if update_freq == "batch" else update_freq
        if not isinstance(log_dir, str | os.PathLike) or not os.fspath(log_dir):
            checks.fail("`log_dir` must be the path of a directory.", log_dir=log_dir)
        path = storage.path(log_dir)
        self.log_dir = self._local_dir = os.fspath(path)
        if processes.index() == 0:
            storage.make_writable(path)  # so that errors come before data are prepared
            if isinstance(path, storage.RemotePath):
                self._local_dir = tempfile.mkdtemp()  # whose files are copied to `log_dir`
                weakref.finalize(self, shutil.rmtree, self._local_dir, ignore_errors=True)
        self._writer_class = Writer
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Open the training run's file, so a full disk is detected before training."""
        super().on_train_begin(logs)
        self._calls = self._calls_before = 0
        if processes.index() == 0:
            self._writer("train")
        self._flush()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        self._calls_before = self._calls if batch == 0 else self._calls_before
        self._calls += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the batch, if it is its turn; on JAX this may be called in any thread and order."""
        step = self._calls_before + (batch + 1) // self._model.steps_per_execution
        if self.update_freq == "epoch" or step % self.update_freq:
            return
        scalars = dict(logs or {})
        if self._has_rate:
            notes = [*self._notes]
            while notes[-1][0] > batch:  # Steps may have begun since.
                notes.pop()
            step = int(notes[-1][1])
            scalars["learning_rate"] = self._rate_of(self._update_before(step), notes)
        self._write("batch", scalars, step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        scalars = dict(logs or {})
        if self._has_rate:
            scalars["learning_rate"] = self._applied_rate()
        self._write("epoch", scalars, epoch)
        self._flush()

    def _write(self, kind: str, scalars: Mapping[str, Any], step: int) -> None:
        for name, value in scalars.items():
            if processes.index() == 0 and isinstance(value, numbers.Real):
                writer = self._writer("validation" if name.startswith("val_") else "train")
                tag = f"{kind}_{name.removeprefix('val_')}"
                writer.add_scalar(f"device/{name}" if is_reading(name) else tag, value, step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._copy()

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            self._writers[run] = self._writer_class(f"{self._local_dir}/{run}")
        return self._writers[run]

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()
        self._copy()

    def _copy(self) -> None:
        """Copy the files to object storage, where they cannot grow; report what fails."""
        if self._local_dir == self.log_dir:
            return
        try:
            for file in filter(Path.is_file, Path(self._local_dir).rglob("*")):
                name = file.relative_to(self._local_dir)
                storage.RemotePath(self.log_dir, name).upload(file)
        except OSError as error:
            processes.report(f"{error} The end of the next epoch, if there is one, tries again.")
