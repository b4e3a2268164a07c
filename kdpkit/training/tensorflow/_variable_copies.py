"""The variables' copies on the devices, as layers read them there: gradients meet here.

Each device reads its own copy, and the gradient of what it has read goes to the value of the
variable's first copy, which is the one that tapes know (`_on_device`). So no code here adds
gradients up: a tape does, those of all parts and of what the step computes with the variable
itself, as it adds up those of several uses on one device.
"""

from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_stateless_scope
from kdpkit.training.tensorflow._collectives import sum_gradients
from kdpkit.training.tensorflow._gradients import dense_if_unique
from kdpkit.training.tensorflow._keras_internals import (
    is_differentiable,
    read_unwatched,
    unrecorded,
    with_gradient,
)
from kdpkit.training.tensorflow._step import Part
from kdpkit.training.tensorflow._tensor_parts import to


class PartScope(keras.StatelessScope):
    """What a part's call reads, and what it assigns, which nobody else sees.

    Args:
        part: The part.
        read: Values of variables that were read already, by the parts of the same call.
    """

    def __init__(self, part: Part, read: dict[int, Any]) -> None:
        super().__init__(collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}
        self._values: dict[int, Any] = {}  # of other variables
        self._graph = tf.compat.v1.get_default_graph()
        self._part, self._read = part, read
        self._around = get_stateless_scope()

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self.assigned:
            return self.state_mapping[id(variable)]
        if id(variable) not in self._values:
            with self._graph.as_default():  # also in a function or a loop inside of the layer
                value = self._value(variable)
            if value is None:  # it is being made
                return None
            self._values[id(variable)] = value
        return self._values[id(variable)]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def _value(self, variable: keras.Variable) -> Any:
        step = self._part.step
        given = self._around and self._around.get_current_value(variable)
        if given is not None:  # by the user, or by the call of a block around
            return to(self._part.device, sum_gradients(step.mesh, given, step.channel()))
        held = variable._value
        if held is None:
            return None
        if id(variable) not in self._read:
            with tf.device(None):
                value = tf.convert_to_tensor(held)
                self._read[id(variable)] = sum_gradients(step.mesh, value, step.channel())
        return _on_device(self._part, held, self._read[id(variable)])


def _on_device(part: Part, variable: Any, value: Any) -> Any:
    """Return a variable's value on a device; tapes add up its gradients at `value`."""
    is_copied = isinstance(variable, tf.distribute.DistributedValues)
    # Inside a condition or a loop TensorFlow derives gradients from operations, not from what a
    # tape was told: there the value itself is moved.
    if not is_copied or not part.step.is_here():
        return to(part.device, value)
    with unrecorded(), tf.device(part.device):
        own = read_unwatched(variable.values[part.index])
    return with_gradient(own, value, dense_if_unique) if is_differentiable(own) else own
