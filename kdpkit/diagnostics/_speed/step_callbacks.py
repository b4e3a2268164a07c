"""Which callbacks act on every step, and may be called for a measurement."""

from typing import Any

import keras
from keras.callbacks import Callback

_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_WRITING = ("BackupAndRestore", "ModelCheckpoint", "RemoteMonitor", "Resume", "TensorBoard")


def acting_on_steps(callbacks: Any) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that act on steps: those to measure, and those that save or log to disk.

    A callback that acts between epochs alone takes no time of a step.
    """
    given = getattr(callbacks, "callbacks", callbacks) or ()
    acting = [callback for callback in keras.tree.flatten(given) if _acts(callback)]
    writing = [callback for callback in acting if _writes(callback)]
    return [callback for callback in acting if callback not in writing], writing


def left_out(writing: list[Callback]) -> str:
    """Return a note on callbacks that are not measured."""
    return f"{names_of(writing)} may save or log at steps, and was left out."


def names_of(callbacks: list[Callback]) -> str:
    """Return the names of callbacks' classes."""
    return ", ".join(dict.fromkeys(f"`{type(callback).__name__}`" for callback in callbacks))


def _acts(callback: Callback) -> bool:
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)
        for name in _HOOKS
    )


def _writes(callback: Callback) -> bool:
    return any(
        parent.__name__ in _WRITING and parent.__module__.split(".")[0] in ("keras", "kdpkit")
        for parent in type(callback).__mro__
    )
