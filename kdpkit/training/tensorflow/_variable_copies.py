"""The devices' copies of variables, as layers read them there, and where their gradients meet.

Each device reads its own copy, and the gradient of what it has read goes to the value of the first
copy, which tapes watch. So no code here adds gradients up: a tape adds up those of all parts, as it
adds up those of several uses on one device.
"""

from typing import Any

import keras
import tensorflow as tf

from kdpkit.training._keras_internals import get_stateless_scope
from kdpkit.training.tensorflow._collectives import with_summed_gradient
from kdpkit.training.tensorflow._gradients import dense_if_unique
from kdpkit.training.tensorflow._keras_internals import (
    is_differentiable,
    read_unwatched,
    stop_recording,
    with_gradient,
)
from kdpkit.training.tensorflow._step import Part, graph
from kdpkit.training.tensorflow._tensor_parts import moved_to


class PartScope(keras.StatelessScope):
    """What the call of a layer on a part reads, and what it assigns, which nobody else sees.

    All parts of one call share the values of variables, by their ids.
    """

    def __init__(self, part: Part, values: dict[int, Any]) -> None:
        super().__init__(collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}
        self._part, self._values = part, values
        self._values_on_device: dict[int, Any] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._outer_scope = get_stateless_scope()

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self.assigned:
            return self.state_mapping[id(variable)]
        if id(variable) not in self._values_on_device:
            with self._graph.as_default():  # also in a function or a loop inside of the layer
                value = self._value(variable)
            if value is None:  # The variable is being made.
                return None
            self._values_on_device[id(variable)] = value
        return self._values_on_device[id(variable)]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def _value(self, variable: keras.Variable) -> Any:
        step, tf_variable = self._part.step, variable._value
        value = self._outer_scope and self._outer_scope.get_current_value(variable)
        if value is not None:  # which the user set, or the call of a block around
            value = with_summed_gradient(step.mesh, value, step.channel())
            return moved_to(self._part.device, value)
        if tf_variable is None:
            return None
        if id(variable) not in self._values:
            with tf.device(None):
                value = tf.convert_to_tensor(tf_variable)
                self._values[id(variable)] = with_summed_gradient(step.mesh, value, step.channel())
        return _on_device(self._part, tf_variable, self._values[id(variable)])


def _on_device(part: Part, tf_variable: Any, value: Any) -> Any:
    """Return a variable's value on a device; tapes add up its gradients at `value`."""
    has_copies = isinstance(tf_variable, tf.distribute.DistributedValues)
    # Inside a condition or a loop TensorFlow derives gradients from operations, not from what was
    # recorded for a tape: the value itself is moved.
    if not has_copies or part.step.graph is not graph():
        return moved_to(part.device, value)
    with stop_recording(), tf.device(part.device):
        copy = read_unwatched(tf_variable.values[part.index])
    return with_gradient(copy, value, dense_if_unique) if is_differentiable(copy) else copy
