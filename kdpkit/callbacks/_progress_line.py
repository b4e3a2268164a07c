"""An epoch in one line of a terminal."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import re
import shutil
import sys
import threading
import time
from typing import Any

import keras
import numpy as np

from kdpkit._internal import processes
from kdpkit.callbacks._throughput import batches_ended

_COLUMNS = 100
_INTERVAL_SECONDS = {True: 0.1, False: 30}  # between states of the line, in a terminal and in files
# What is left out: readings of devices, the rate that `PrintLR` prints, and all but one speed.
_ELSEWHERE = re.compile(r"learning_rate|\w+_per_second|\w*(memory_gib|_utilization)")
_SPEEDS = {"tokens_per_second": "tokens/s", "examples_per_second": "examples/s"}


class ProgressLine(keras.callbacks.ProgbarLogger):
    """Shows each epoch in lines of at most 100 columns, in place of Keras' progress bar.

    A line has the steps, the time of a step, one speed, the loss and the metrics; in a terminal it
    is updated in place, in a file it is written every 30 seconds. What does not fit waits for the
    end of the epoch, whose last lines have everything. Readings of devices and the learning rate
    are left out: they are in the logs, for `History`, files and TensorBoard.

    In a run that `Resume` continues inside an epoch, steps are counted from there.

    The first step of each `fit` is announced, because it is compiled: its time is reported by
    itself, and is no part of the time of a step. With several processes
    only the first one shows anything. `evaluate` and `predict` have Keras' bar.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = keras.ops.ones((40, 1))
    >>> history = model.fit(x, x, batch_size=4, callbacks=ProgressLine())  # doctest: +ELLIPSIS
    Compiling the first step ... done in ... s
    Epoch 1/1  10/10  ... s  ... ms/step  loss: ...
    """

    async_safe = True  # on JAX nothing here makes Keras wait for a step

    def __init__(self) -> None:
        super().__init__()
        self._epoch = self._done = 0
        self._compiled = False
        self._compiling_since = self._epoch_since = self._batch_ended = self._shown = 0.0
        self._clock: tuple[int, float] | None = None  # batches and time where steps are timed from
        self._writing = threading.Lock()

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the number of epochs and steps; only the first process shows them."""
        super().set_params(params)
        self.params = params
        if processes.index() > 0:
            self.verbose = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Expect that the first step is compiled."""
        super().on_train_begin(logs)
        self._compiled, self._compiling_since = False, 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a line."""
        self._epoch, self._done, self._clock = epoch + 1, 0, None
        self._epoch_since = time.perf_counter()
        self._shown = 0.0 if _is_live() else self._epoch_since

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Announce the first step; time those after it."""
        if self._clock is None and self._compiled:
            self._clock = self._in_epoch(batch), time.perf_counter()
        elif not self._compiled and not self._compiling_since:
            self._compiling_since = time.perf_counter()
            self._write("Compiling the first step ...")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Update the line; on JAX Keras may call this in several threads at once."""
        with self._writing:
            self._update(batch, logs)

    def _update(self, batch: int, logs: dict[str, Any] | None) -> None:
        self._done = max(self._done, batches_ended(self._in_epoch(batch), self.params))
        now = self._batch_ended = time.perf_counter()
        if not self._compiled:
            self._compiled = True
            self._write(f" done in {now - self._compiling_since:.0f} s\n")
        elif self.verbose == 1 and now - self._shown > _INTERVAL_SECONDS[_is_live()]:
            self._shown = now
            row = _rows(self._items(logs))[0]
            self._write(f"\r{row:<{_width()}}" if _is_live() else f"{row}\n")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Complete the line."""
        first, *others = _rows(self._items(logs))
        start = f"\r{first:<{_width()}}".rstrip(" ") if _is_live() else first
        self._write("\n".join([start, *others]) + "\n")

    def _in_epoch(self, batch: int) -> int:
        """Count the batches of an epoch that `Resume` continues from the epoch's first."""
        return int(self.params.get("first_step", 0)) + batch

    def _items(self, logs: dict[str, Any] | None) -> list[str]:
        logs = logs or {}
        of = f"/{self.target}" if self.target else " steps"
        items = [f"Epoch {self._epoch}/{self.epochs}", f"{self._done}{of}"]
        items.append(f"{time.perf_counter() - self._epoch_since:.0f} s")
        if self._clock and self._done > self._clock[0]:
            step = (self._batch_ended - self._clock[1]) / (self._done - self._clock[0])
            items.append(f"{step:.3g} s/step" if step >= 1 else f"{1000 * step:.3g} ms/step")
        speed = next((name for name in _SPEEDS if name in logs), None)
        if speed:
            items.append(f"{logs[speed]:,.0f} {_SPEEDS[speed]}")
        shown = {name: value for name, value in logs.items() if not _ELSEWHERE.fullmatch(name)}
        return items + [f"{name}: {_text(value)}" for name, value in shown.items()]

    def _write(self, text: str) -> None:
        if self.verbose:
            sys.stdout.write(text)
            sys.stdout.flush()


def _rows(items: list[str]) -> list[str]:
    """Join what fits into a row; the others are indented."""
    rows = [items[0]]
    for item in items[1:]:
        if len(rows[-1]) + 2 + len(item) <= _width():
            rows[-1] += f"  {item}"
        else:
            rows.append(f"    {item}")
    return rows


def _width() -> int:
    return min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns - 1)


def _is_live() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _text(value: Any) -> str:
    number = float(np.mean(value))
    return f"{number:.4f}" if number == 0 or abs(number) >= 1e-3 else f"{number:.2e}"
