"""XLA on several devices compiles the call of a divided layer on each device.

With `compile(jit_compile=True)` XLA cannot compile a step on several devices as one
(keras-team/keras#20763). Here it compiles the calls of divided layers, and with them their backward
passes; of a model of libraries' layers that is the call of the model. Losses, optimizer and metrics
stay TensorFlow's.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import ATTACHED_TENSORS
from kdpkit.training.tensorflow._variable_copies import PartScope


def may_compile(layer: Any) -> bool:
    """Return whether XLA can compile a layer, and its gradient: not the loop of a recurrent one."""
    return all(
        part.unroll for part in layer._flatten_layers() if isinstance(part, keras.layers.RNN)
    )


def compiled(original: Callable, scope: PartScope) -> Callable:
    """Return a call of a layer that XLA compiles; what it assigns and adds is the scope's.

    Masks and logits, which are attributes of tensors, are passed in and out beside the tensors.
    """

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in layer.variables:  # Here tapes see that they are read.
            scope.get_current_value(variable)
        leaves = tf.nest.flatten((args, kwargs))
        structure: Any = None  # of the outputs
        assigned: list[keras.Variable] = []

        def run(tensors: list[Any], masks: list[Any]) -> Any:
            nonlocal structure
            _attach(tensors, [masks])
            copies = iter(tensors)
            arguments = [next(copies) if tf.is_tensor(leaf) else leaf for leaf in leaves]
            inner_args, inner_kwargs = tf.nest.pack_sequence_as((args, kwargs), arguments)
            structure = original(layer, *inner_args, **inner_kwargs)
            outputs = tf.nest.flatten(structure)
            assigned[:] = scope.assigned.values()
            values = [scope.get_current_value(variable) for variable in assigned]
            return outputs, _attached(outputs), values, scope.losses

        function = tf.function(run, jit_compile=True, autograph=False)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        masks, _ = _attached(tensors)
        outputs, attached, values, scope.losses = function(tensors, masks)
        for variable, value in zip(assigned, values, strict=True):
            scope.add_update((variable, value))
        _attach(outputs, attached)
        return tf.nest.pack_sequence_as(structure, outputs)

    return call


def _attached(tensors: list[Any]) -> list[list[Any]]:
    return [[get(tensor) for tensor in tensors] for get, _ in ATTACHED_TENSORS]


def _attach(tensors: list[Any], attached: list[list[Any]]) -> None:
    for (_, attach), values in zip(ATTACHED_TENSORS, attached, strict=False):
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                attach(tensor, value)
