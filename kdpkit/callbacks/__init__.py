"""Keras callbacks for learning rates, speed, devices, checkpoints and resuming.

They work in `fit` on TensorFlow and JAX, on one replica and on many. `training_callbacks` returns
the usual set in the right order; each callback also works alone.
"""

import os

import keras

from kdpkit.callbacks._checkpoint import ModelCheckpoint
from kdpkit.callbacks._devices import DeviceMonitor
from kdpkit.callbacks._learning_rate import LearningRateLogger, PrintLR
from kdpkit.callbacks._progress_line import ProgressLine
from kdpkit.callbacks._resume import Resume
from kdpkit.callbacks._tensorboard import TensorBoard
from kdpkit.callbacks._throughput import Throughput

__all__ = [
    "DeviceMonitor",
    "LearningRateLogger",
    "ModelCheckpoint",
    "PrintLR",
    "ProgressLine",
    "Resume",
    "TensorBoard",
    "Throughput",
    "training_callbacks",
]


def training_callbacks(
    log_dir: str | os.PathLike[str] | None = None,
    *,
    global_batch_size: int | None = None,
    replicas: int = 1,
    tokens_per_example: float | None = None,
    devices: bool | None = None,
) -> list[keras.callbacks.Callback]:
    """Return the usual callbacks in the right order.

    Those that add to the logs come before those that write them: `LearningRateLogger`,
    `Throughput`, `ProgressLine`, `PrintLR`, and with `log_dir` `DeviceMonitor` and `TensorBoard`.
    Your own callbacks that set a learning rate in `on_train_batch_begin` or add to the logs go
    before them.

    Args:
        log_dir: Directory for TensorBoard's event files; None writes none.
        global_batch_size: Examples in one batch, over all replicas; None only measures steps.
        replicas: Replicas that a batch is split over.
        tokens_per_example: The mean number of real tokens in an example, padding not counted.
        devices: Whether to include `DeviceMonitor`. None includes it if there is a `log_dir`,
            because its readings are mainly useful as curves.

    Raises:
        ValueError: An argument is invalid, as in `Throughput` and `TensorBoard`.

    >>> [type(callback).__name__ for callback in training_callbacks(global_batch_size=32)]
    ['LearningRateLogger', 'Throughput', 'ProgressLine', 'PrintLR']
    """
    writing = [] if log_dir is None else [TensorBoard(log_dir)]
    if devices is None:
        devices = bool(writing)
    return [
        LearningRateLogger(),
        Throughput(global_batch_size, replicas=replicas, tokens_per_example=tokens_per_example),
        *([DeviceMonitor()] if devices else []),
        ProgressLine(),
        PrintLR(),
        *writing,
    ]
