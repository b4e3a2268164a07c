"""Keras callbacks for learning rates, speed, devices, TensorBoard and resuming.

They work in `fit` on TensorFlow and JAX, on one replica and on many. `training_callbacks` returns
the usual set in the right order; each callback also works on its own.
"""

from kdpkit.callbacks._devices import DeviceMonitor
from kdpkit.callbacks._learning_rate import LearningRateLogger, PrintLR
from kdpkit.callbacks._resume.callback import Resume
from kdpkit.callbacks._tensorboard import TensorBoard
from kdpkit.callbacks._throughput import Throughput
from kdpkit.callbacks._usual import training_callbacks

__all__ = [
    "DeviceMonitor",
    "LearningRateLogger",
    "PrintLR",
    "Resume",
    "TensorBoard",
    "Throughput",
    "training_callbacks",
]
