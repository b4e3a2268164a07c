"""The usual callbacks, in the right order."""

import os
from typing import Any

import keras

from kdpkit.callbacks._devices import DeviceMonitor
from kdpkit.callbacks._learning_rate import LearningRateLogger, PrintLR
from kdpkit.callbacks._tensorboard import TensorBoard
from kdpkit.callbacks._throughput import Throughput


class _ProgressLine(keras.callbacks.ProgbarLogger):
    """Keras' progress line, printed before later callbacks add to the logs."""

    async_safe = True  # As where Keras adds the line itself, no step on JAX waits for it.

    def set_params(self, params: dict[str, Any]) -> None:
        # Loops that users write set few of these.
        super().set_params({"verbose": 0, "epochs": 1, "steps": None} | params)


def training_callbacks(
    log_dir: str | os.PathLike[str] | None = None,
    *,
    global_batch_size: int | None = None,
    tokens_per_example: float | None = None,
    verbose: int = 1,
) -> list[keras.callbacks.Callback]:
    """Return the usual callbacks in the right order.

    Keras' progress line comes first, without what the others add to the logs: `LearningRateLogger`,
    `PrintLR`, `Throughput`, and with `log_dir` `DeviceMonitor` and `TensorBoard`. Your callbacks
    that add to the logs go before them. Where the output goes to a file, `fit(verbose=2)` writes a
    line for each epoch.

    Args:
        log_dir: Directory for TensorBoard's event files; None writes none.
        global_batch_size: Examples in one batch, over all replicas; None only measures steps.
        tokens_per_example: The mean number of real tokens in an example, padding not counted.
        verbose: 0 leaves out `PrintLR`.

    Raises:
        ValueError: An argument is invalid, as in `Throughput` and `TensorBoard`.

    >>> [type(callback).__name__ for callback in training_callbacks(global_batch_size=32)]
    ['_ProgressLine', 'LearningRateLogger', 'PrintLR', 'Throughput']
    """
    usual = [
        _ProgressLine(),
        LearningRateLogger(),
        *([PrintLR()] if verbose else []),
        Throughput(global_batch_size, tokens_per_example=tokens_per_example),
    ]
    return usual if log_dir is None else [*usual, DeviceMonitor(), TensorBoard(log_dir)]
