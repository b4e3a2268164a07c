"""Which layers are divided: those of libraries, and those that keep the law when it is tried."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask
from kdpkit.training.tensorflow import _layer_trial
from kdpkit.training.tensorflow._keras_internals import global_state
from kdpkit.training.tensorflow._library_layers import (
    has_too_few_axes,
    is_composed,
    is_library,
    is_of_a_library,
    is_written_by_libraries,
    layers_of,
)


class Policy:
    """Decides whether the call of a layer is divided.

    Args:
        divided: Layers that the user declares as divided.
        undivided: Layers that the user declares as undivided.
    """

    def __init__(
        self,
        divided: Sequence[keras.layers.Layer] = (),
        undivided: Sequence[keras.layers.Layer] = (),
    ) -> None:
        declared = {id(layer): True for layer in divided}
        self._declared = declared | {id(layer): False for layer in undivided}
        self._tried: dict[Any, tuple[Any, _layer_trial.Finding]] = {}

    def __call__(
        self, layer: keras.layers.Layer, args: Any, kwargs: Any, *, as_one: bool = False
    ) -> bool:
        """Return whether devices compute their parts of what a layer is called on.

        Args:
            layer: The layer.
            args: What it is called on.
            kwargs: What it is called on by name.
            as_one: Whether a model of libraries' layers is divided as one, for XLA to compile it.
        """
        if id(layer) in self._declared:
            return self._declared[id(layer)]
        if _has_statistics_inside(layer) or _keeps_masks(layer):
            return False  # its layers are asked
        if is_composed(layer):
            return as_one and is_of_a_library(layer)
        if is_of_a_library(layer):
            return not has_too_few_axes(layer, args, kwargs)
        return self.finding(layer, args, kwargs).verdict is _layer_trial.Verdict.KEPT

    def finding(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> _layer_trial.Finding:
        """Return whether a layer computes each example by itself, tried once for a kind."""
        kwargs = _with_mode(layer, args, kwargs)
        key = _identity(layer), _signature(layer, args, kwargs)
        if key not in self._tried:
            self._tried[key] = layer, _layer_trial.try_layer(layer, args, kwargs)
        return self._tried[key][1]

    def forget(self) -> None:
        """Try layers again: their attributes may have changed."""
        self._tried.clear()


def _identity(layer: keras.layers.Layer) -> Any:
    """Return what stands for a layer: a library's that are configured alike do the same.

    A function of the user's is only a name there, which others may have.
    """
    if is_written_by_libraries(layer):
        with contextlib.suppress(Exception):  # those of Llama and Swin fail: each is tried then
            return type(layer), str({**layer.get_config(), "name": None})
    return id(layer)


def _with_mode(layer: keras.layers.Layer, args: Any, kwargs: Any) -> dict[str, Any]:
    """Add what a layer has of the call around it, `training` say: it is tried outside of that."""
    context = global_state.get_global_attribute("current_call_ctx")
    given = inspect.signature(layer.call).bind_partial(*args).arguments
    names = [name for name in layer._call_context_args if name not in given]
    mode = {name: getattr(context, name, None) for name in names}
    return {name: value for name, value in mode.items() if value is not None} | kwargs


def _signature(layer: keras.layers.Layer, args: Any, kwargs: Any) -> str:
    """Return what a layer's code may depend on: shapes, types and other arguments.

    A library's does the same for any sizes: a head is called on many levels of a pyramid.
    """
    is_of_any_size = is_written_by_libraries(layer)

    def of(leaf: Any) -> str:
        if not tf.is_tensor(leaf):
            return str(leaf)
        known, rank = tf.get_static_value(leaf), leaf.shape.rank
        shape = f"{leaf.shape[:1]} {rank}" if is_of_any_size and rank else leaf.shape
        return f"{shape} {leaf.dtype} {get_keras_mask(leaf) is None} {known}"

    return str(tf.nest.map_structure(of, (args, kwargs)))


def is_batch_norm(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is Keras' BatchNormalization, or does what that does."""
    return isinstance(layer, keras.layers.BatchNormalization) and all(
        is_library(getattr(type(layer), name).__module__) for name in ("call", "_moments")
    )


def _keeps_masks(layer: keras.layers.Layer) -> bool:
    """Return whether a recurrent cell keeps what it drops from one call to the next."""
    return hasattr(layer, "_dropout_mask") and bool(layer.dropout or layer.recurrent_dropout)


def _has_statistics_inside(layer: keras.layers.Layer) -> bool:
    """Return whether a layer's layers need the examples of all parts, or add to the loss."""
    return any(
        part is not layer
        and (
            isinstance(part, keras.layers.BatchNormalization)
            or getattr(part, "activity_regularizer", None) is not None
        )
        for part in layers_of(layer)
    )
