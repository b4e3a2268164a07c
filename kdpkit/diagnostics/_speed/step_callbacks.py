"""Which callbacks act on every step, and may be called for a measurement."""

from typing import Any

from keras.callbacks import Callback

from kdpkit.diagnostics import _callbacks

_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_WRITING = ("BackupAndRestore", "ModelCheckpoint", "RemoteMonitor", "Resume", "TensorBoard")


def acting_on_steps(callbacks: Any) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that act on steps: those to measure, and those that save or log to disk.

    A callback that acts between epochs alone takes no time of a step.
    """
    given = _callbacks.each_of(callbacks)
    acting = [callback for callback in given if _callbacks.has_hook(callback, _HOOKS)]
    writing = [callback for callback in acting if _writes(callback)]
    return [callback for callback in acting if callback not in writing], writing


def names_of(callbacks: list[Callback]) -> str:
    """Return the names of callbacks' classes."""
    return ", ".join(dict.fromkeys(f"`{type(callback).__name__}`" for callback in callbacks))


def _writes(callback: Callback) -> bool:
    return any(
        parent.__name__ in _WRITING and parent.__module__.split(".")[0] in ("keras", "kdpkit")
        for parent in type(callback).__mro__
    )
