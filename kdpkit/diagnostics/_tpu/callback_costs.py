"""What callbacks cost on a TPU: where Keras brings each batch's logs to the host.

Keras turns the logs of every batch into Python numbers before it calls the callbacks
(`CallbackList._on_train_batch_end` in `keras/src/callbacks/callback_list.py`), which waits for the
step. On JAX it does so in threads of its own, while the next steps are sent ahead, unless a
callback has a hook for the end of a batch and is not `async_safe`; Keras' own progress line and
History, which a `CallbackList` adds itself, do no harm.
"""

from collections.abc import Iterator
from typing import Any

import keras
from keras.callbacks import Callback

from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics import _callbacks

_HOOKS = ("on_batch_end", "on_train_batch_end")  # those that Keras looks at


def findings(callbacks: Any) -> Iterator[Finding]:
    """Check Keras callbacks; only on JAX does it depend on them whether Keras waits."""
    for callback in _callbacks.each_of(callbacks):
        if keras.backend.backend() == "jax" and makes_keras_wait(callback):
            yield Finding(
                "host-transfer",
                "slow",
                f"callback {type(callback).__name__}",
                "It has a hook for the end of a batch and is not `async_safe`, so Keras waits for "
                "every step and brings its logs to the host, while the TPU has nothing to do.",
                "Move the work to `on_epoch_end`; or, where the hook does not use the model and "
                "may run in another thread, set `async_safe = True` on its class. "
                "`kdpkit.callbacks` have both.",
            )


def makes_keras_wait(callback: Callback) -> bool:
    """Return whether a callback makes Keras on JAX wait for each step, as Keras decides it."""
    return not getattr(callback, "async_safe", False) and _callbacks.has_hook(callback, _HOOKS)
