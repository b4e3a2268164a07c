"""The callbacks that `fit` is given, one by one, and their hooks."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.callbacks import Callback, CallbackList

from kdpkit._internal import checks

_KERAS_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


def each_of(callbacks: Any) -> Iterator[Callback]:
    """Return callbacks one by one, also those in a `CallbackList`, without what it adds itself."""
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, CallbackList):
            yield from (each for each in callback.callbacks if not isinstance(each, _KERAS_OWN))
        elif isinstance(callback, Callback):
            yield callback
        elif callback is not None:
            checks.fail("`callbacks` must be Keras callbacks.", callback=callback)


def has_hook(callback: Callback, names: Iterable[str]) -> bool:
    """Return whether a callback, or its class, has a hook of its own under one of the names."""
    hooks = ((getattr(callback, name), getattr(Callback, name)) for name in names)
    return any(getattr(hook, "__func__", hook) is not default for hook, default in hooks)
