"""What a training state has of a callback: plain values, and weights."""

from typing import Any

import keras
import numpy as np

from kdpkit._internal import checks

# Keras has no interface for the state of its callbacks, so these attributes are saved.
_STATE_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


def state_of(callback: keras.callbacks.Callback) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a callback's state; raise for an unknown kind without `get_state` and `set_state`."""
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        return plain(callback.get_state()), []
    for kind, names in _STATE_ATTRIBUTES.items():
        if isinstance(callback, kind):
            values = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
            weights = values.pop("best_weights", None)
            return plain(values), weights or []
    return checks.fail(
        "`Resume` does not know the state of this callback.",
        callback=type(callback).__name__,
        remedy="Add `get_state()` and `set_state(values)`, or leave it out.",
    )


def set_state(
    callback: keras.callbacks.Callback, values: dict[str, Any], weights: list[np.ndarray]
) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(values)
        return
    for name, value in values.items():
        setattr(callback, name, value)
    if weights:
        callback.best_weights = weights


def was_reset(callback: keras.callbacks.Callback, values: dict[str, Any]) -> bool:
    """Return whether the callback's `on_train_begin` has undone `set_state`."""
    kinds = keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau
    return isinstance(callback, kinds) and repr(state_of(callback)[0]) != repr(values)


def plain(structure: Any) -> Any:
    """Convert numbers, texts and arrays in a structure to Python values, which JSON can hold."""
    return keras.tree.map_structure(_plain_value, structure)


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(keras.ops.convert_to_numpy(value))
    if array.dtype.hasobject:
        checks.fail(
            "A state of `Resume` holds numbers, text, and lists of them.",
            value=value,
            remedy="Convert what is in `logs`, or in what `get_state` returns.",
        )
    return array.tolist()
