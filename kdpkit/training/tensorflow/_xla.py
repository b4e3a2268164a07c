"""XLA on several devices: what it compiles.

With `compile(jit_compile=True)` XLA cannot compile a step on several devices as one
(keras-team/keras#20763). What it compiles here is the call of a divided layer on each device, and
with it the backward pass; of a model of libraries' layers that is the call of the model. Losses,
optimizer and metrics stay TensorFlow's.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow._copies import PartScope
from kdpkit.training.tensorflow._keras_internals import get_logits, set_logits


def may_compile(layer: Any) -> bool:
    """Return whether XLA can compile a layer, and its gradient: not the loop of a recurrent one."""
    loops = (of for of in layer._flatten_layers() if isinstance(of, keras.layers.RNN))
    return all(of.unroll for of in loops)


def compiled(original: Callable, scope: PartScope) -> Callable:
    """Return a call of a layer that XLA compiles; what it assigns and adds is the scope's.

    What is kept on tensors, masks and logits, is passed beside them.
    """

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in layer.variables:  # outside, where tapes see it
            scope.get_current_value(variable)
        leaves = tf.nest.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        masks = [*map(get_keras_mask, tensors)]
        added: list[Any] = []

        def run(tensors: list[Any], masks: list[Any]) -> Any:
            following = iter(tensors)
            given = [next(following) if tf.is_tensor(leaf) else leaf for leaf in leaves]
            _set(tensors, masks, set_keras_mask)
            inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), given)
            outputs = original(layer, *inner_args, **inner_kwargs)
            flat = tf.nest.flatten(outputs)
            added[:] = [outputs, [*scope.assigned.values()]]
            values = [scope.get_current_value(variable) for variable in scope.assigned.values()]
            return (
                flat,
                [*map(get_keras_mask, flat)],
                [*map(get_logits, flat)],
                values,
                scope.losses,
            )

        function = tf.function(run, jit_compile=True, autograph=False)
        flat, of_masks, of_logits, values, scope.losses = function(tensors, masks)
        outputs, variables = added
        for variable, value in zip(variables, values, strict=True):
            scope.add_update((variable, value))
        _set(flat, of_masks, set_keras_mask)
        _set(flat, of_logits, set_logits)
        return tf.nest.pack_sequence_as(outputs, flat)

    return call


def _set(tensors: list[Any], values: list[Any], put: Callable) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if value is not None:
            put(tensor, value)
