"""What callbacks cost on a TPU: where Keras brings each batch's logs to the host.

Keras turns the logs of every batch into Python numbers before it calls the callbacks
(`CallbackList._on_train_batch_end` in `keras/src/callbacks/callback_list.py`), which waits for the
step. On JAX it does so in threads of its own, while the next steps are sent ahead, unless a
callback has a hook for the end of a batch and is not `async_safe`; Keras' own progress line and
History are added later, and do no harm. On TensorFlow it does so in every case.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kdpkit._findings import Finding

_HOOKS = ("on_batch_end", "on_train_batch_end")  # those that Keras looks at
_BATCHES_BETWEEN_WRITES = 50  # fewer are often


def findings(callbacks: Iterable[Any], *, steps_at_once: int) -> Iterator[Finding]:
    """Check the callbacks of a training.

    Args:
        callbacks: Keras callbacks.
        steps_at_once: Steps in a compiled call, after which callbacks are called.
    """
    callbacks = keras.tree.flatten(callbacks or ())
    if keras.backend.backend() == "jax":
        yield from (_waits(callback) for callback in callbacks if makes_keras_wait(callback))
    else:
        yield from filter(None, map(_writes_often, callbacks))
        if steps_at_once == 1:
            yield _each_step()


def makes_keras_wait(callback: Any) -> bool:
    """Tell whether a callback makes Keras on JAX wait for each step, as Keras decides it."""
    if getattr(callback, "async_safe", False):
        return False
    hooks = ((getattr(callback, name), getattr(keras.callbacks.Callback, name)) for name in _HOOKS)
    return any(getattr(hook, "__func__", hook) is not default for hook, default in hooks)


def _waits(callback: Any) -> Finding:
    return Finding(
        "host-transfer",
        "slow",
        f"callback {type(callback).__name__}",
        "It has a hook for the end of a batch and is not `async_safe`, so Keras waits for every "
        "step and brings its logs to the host, while the TPU has nothing to do.",
        "Move the work to `on_epoch_end`; or, where the hook touches no model and may run in "
        "another thread, set `async_safe = True` on its class. `kdpkit.callbacks` have both.",
    )


def _writes_often(callback: Any) -> Finding | None:
    every: Any = getattr(callback, "update_freq", "epoch")
    if every == "epoch" or every >= _BATCHES_BETWEEN_WRITES:
        return None
    return Finding(
        "host-transfer",
        "slow",
        f"callback {type(callback).__name__}",
        f"`update_freq={every}` writes the logs of {'every batch' if every == 1 else 'batches'} "
        "between two steps.",
        "Leave it at `update_freq='epoch'`, or take some hundreds of batches.",
    )


def _each_step() -> Finding:
    return Finding(
        "host-transfer",
        "note",
        "fit",
        "On TensorFlow Keras brings the logs to the host after each compiled call, whatever the "
        "callbacks, and the next step begins only then.",
        "Put several steps into a call: `compile(steps_per_execution=...)`, or "
        "`TrainingLoop(steps_per_loop=...)`.",
    )
