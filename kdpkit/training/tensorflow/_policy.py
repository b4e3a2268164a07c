"""Which layers are divided: those of libraries, and those whose trial shows that they may be."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask
from kdpkit.training.tensorflow._keras_internals import global_state
from kdpkit.training.tensorflow._layer_trial import Finding, Verdict, try_layer
from kdpkit.training.tensorflow._library_layers import (
    has_too_few_axes,
    is_composed,
    is_library,
    is_of_a_library,
    is_written_by_libraries,
    layers_of,
)
from kdpkit.training.tensorflow._step import Step


class Policy:
    """Decides whether the call of a layer is divided; users declare some as divided, or not."""

    def __init__(
        self,
        divided: Sequence[keras.layers.Layer] = (),
        undivided: Sequence[keras.layers.Layer] = (),
    ) -> None:
        declared = {id(layer): True for layer in divided}
        self._declared = declared | {id(layer): False for layer in undivided}
        self._findings: dict[Any, tuple[Any, Finding]] = {}

    def divides(self, step: Step, layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
        """Return whether each device computes its part; for XLA a model may be one layer."""
        if id(layer) in self._declared:
            return self._declared[id(layer)]
        # A recurrent cell keeps what it drops from one call to the next.
        keeps_masks = hasattr(layer, "_dropout_mask") and (layer.dropout or layer.recurrent_dropout)
        keeps_states = any(getattr(part, "stateful", False) for part in layers_of(layer))
        if keeps_masks or keeps_states or _has_statistics_inside(layer):
            return False  # The layers in it may be divided.
        if is_composed(layer):
            return step.jit and is_of_a_library(layer)
        if is_of_a_library(layer):
            return not has_too_few_axes(layer, args, kwargs)
        return self.finding(layer, args, kwargs).verdict is Verdict.KEPT

    def finding(self, layer: keras.layers.Layer, args: Any, kwargs: Any) -> Finding:
        """Return whether a layer computes each example by itself, tried once for each kind."""
        # The trial is outside of the call around, which would pass `training`, for example.
        call_context = global_state.get_global_attribute("current_call_ctx")
        passed = inspect.signature(layer.call).bind_partial(*args).arguments
        names = [name for name in layer._call_context_args if name not in passed]
        values = {name: getattr(call_context, name, None) for name in names}
        kwargs = {name: value for name, value in values.items() if value is not None} | kwargs
        key = _identity(layer), _signature(layer, args, kwargs)
        if key not in self._findings:
            # The layer is stored because its id must not be another layer's later.
            self._findings[key] = layer, try_layer(layer, args, kwargs)
        return self._findings[key][1]

    def forget(self) -> None:
        """Try layers again, because their attributes may have changed."""
        self._findings.clear()


def _identity(layer: keras.layers.Layer) -> Any:
    """Return what identifies a layer: of a library's its config, because equal ones do the same.

    A function of the user's is only a name in a config, which other functions may have.
    """
    if is_written_by_libraries(layer):
        with contextlib.suppress(Exception):  # The configs of Llama and Swin fail.
            return type(layer), str({**layer.get_config(), "name": None})
    return id(layer)


def _signature(layer: keras.layers.Layer, args: Any, kwargs: Any) -> str:
    """Return what a layer's code may depend on: shapes, types and other arguments.

    A library's layer does the same for any sizes, as a head that is called on many levels of a
    pyramid.
    """
    is_of_any_size = is_written_by_libraries(layer)

    def described(leaf: Any) -> str:
        if not tf.is_tensor(leaf):
            return str(leaf)
        value, rank = tf.get_static_value(leaf), leaf.shape.rank
        shape = f"{leaf.shape[:1]} {rank}" if is_of_any_size and rank else leaf.shape
        return f"{shape} {leaf.dtype} {get_keras_mask(leaf) is None} {value}"

    return str(tf.nest.map_structure(described, (args, kwargs)))


def is_batch_norm(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is Keras' BatchNormalization, or computes the same."""
    return isinstance(layer, keras.layers.BatchNormalization) and all(
        is_library(getattr(type(layer), name).__module__) for name in ("call", "_moments")
    )


def _has_statistics_inside(layer: keras.layers.Layer) -> bool:
    """Return whether a layer's layers need the examples of all parts, or add to the loss."""
    return any(
        isinstance(part, keras.layers.BatchNormalization)
        or getattr(part, "activity_regularizer", None) is not None
        for part in layers_of(layer)
        if part is not layer
    )
