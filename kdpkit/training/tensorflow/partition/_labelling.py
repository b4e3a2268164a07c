"""What devices have of each tensor of a step, found by one rule for each kind of operation.

An operation without a rule, or to which its rule does not apply, is computed on all examples by the
first device: a missing rule costs time, and never makes a number wrong.
"""

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow.partition import _rules
from kdpkit.training.tensorflow.partition._labels import (
    PARTIAL,
    SAME,
    SIZE,
    WHOLE,
    Operation,
    Split,
    is_divided,
    is_list,
    is_size,
)


class LabelledGraph:
    """The labels of a graph's tensors.

    Args:
        inferred: Its shapes, for both lengths.
        given: The labels of its inputs, by their names.
        bodies: What labels the functions of loops and conditions; None leaves them whole.
        replicated: The names of variables of which each device has a copy. None says that the graph
            is the function of a loop or condition, which each device runs on its parts: numbers
            that count examples are then those of the device's.
    """

    def __init__(
        self,
        inferred: Any,
        given: dict[str, Any],
        bodies: Any,
        replicated: Collection[str] | None = None,
        zeros: Collection[str] = (),
    ) -> None:
        self.first, self.second = inferred.graphs
        self.longer = inferred.longer
        self.axes, self.bodies, self.is_body = inferred.axes, bodies, replicated is None
        self._replicated, self._zeros = {*(replicated or ())}, {*zeros}
        self.labels = dict(given)
        # Computed of variables, constants and ranks alone, whatever their lengths are.
        self.without_batch = {name for name, label in given.items() if label is SAME}
        self.unbroadcast: dict[str, Any] = {}  # sums that undo a broadcast, as the rules find them
        # What the first device computes of parts or terms, or of all examples: for want of a rule,
        # or because it needs a sum, which is no loss.
        self.whole: list[tf.Operation] = []
        for op in self.first.get_operations():
            if op.type != "Placeholder":
                self._label(op)

    def of(self, tensor: Any) -> Any:
        return self.labels.get(tensor.name, SAME)

    def is_constant(self, x: tf.Tensor) -> bool:
        """Return whether the length of no axis depends on the batch."""
        if x.dtype in (tf.resource, tf.variant) or x.name in self.without_batch:
            return True
        if not x.shape.is_fully_defined():
            return False
        return bool(x.shape == self.second.get_tensor_by_name(x.name).shape)

    def _label(self, op: tf.Operation) -> None:
        labels = [self.of(x) for x in op.inputs]
        if op.type == "Identity" and op.inputs[0].name in self._zeros:
            self._zeros.add(op.outputs[0].name)
        if op.type in (*_READS, "Rank") or all(x.name in self.without_batch for x in op.inputs):
            self.without_batch.update(x.name for x in op.outputs)
        found = self._by_rule(op, labels)
        if found and op.type in _rules.WITH_BODIES:  # which return the variables that they read
            self._replicated.update(x.name for x in op.outputs if x.dtype == tf.resource)
        if found is None:
            needs_examples = any(is_divided(label) or label is WHOLE for label in labels)
            has_size = any(map(is_size, labels)) and not needs_examples
            found = [self._undivided(x, has_size=has_size) for x in op.outputs]
            # Devices would do it with numbers of their own, or more than once.
            is_of_all = any(label is not SIZE for label in found)
            is_of_all = is_of_all or op.type not in _rules.PROPORTIONAL
            differs = _is_stateful(op) or (has_size and is_of_all)
            if (needs_examples and op.outputs) or (self.is_body and differs):
                self.whole.append(op)
            if self.bodies and any(map(is_list, labels)):
                self.bodies.failed.append(op)  # Lists of parts cannot be joined.
        self.labels.update((x.name, label) for x, label in zip(op.outputs, found, strict=True))

    def _undivided(self, x: tf.Tensor, *, has_size: bool) -> Any:
        """Label what the first device computes."""
        if not self.is_constant(x):
            return WHOLE
        counts = has_size and x.dtype.is_integer and (x.shape.rank or 0) <= 1
        return SIZE if counts else SAME

    def _by_rule(self, op: tf.Operation, labels: list[Any]) -> list[Any] | None:
        if op.type in _READS:
            return [SAME]
        rule = _rules.RULES.get(op.type)
        is_text = any(x.dtype == tf.string for x in op.outputs)  # which processes cannot send
        if rule is None or is_text or _is_stateful(op) or not self._has_copies(op):
            return None
        has_bodies = op.type in _rules.WITH_BODIES
        if PARTIAL in labels and not has_bodies:
            if op.type in _rules.LINEAR and _rules.is_linear(op, labels, self._zeros):
                return self._trusted(op, [PARTIAL] * len(op.outputs))
            if self.is_body:  # where nothing adds them up
                return None
            # It needs the sum: the terms are added up, and devices get copies (`Writer._whole`).
            labels = [SAME if label is PARTIAL else label for label in labels]
        if WHOLE in labels:
            if not any(map(is_divided, labels)) and op.type not in _rules.HEAVY:
                return None  # It is not worth to be cut into parts.
            labels = [
                Split(self.axes[x.name]) if label is WHOLE and x.name in self.axes else label
                for x, label in zip(op.inputs, labels, strict=True)
            ]
            if WHOLE in labels:  # of unknown length
                return None
        if not any(map(is_divided, labels)) and op.type not in _rules.GENERATING:
            return None
        if not has_bodies:
            counting = _rules.COUNTING.get(op.type, ())
            numbers = [i for i, label in enumerate(labels) if is_size(label) and i not in counting]
            # The number of a device's examples is that of all only as a length of its parts.
            if numbers and self.is_body:
                return None
            labels = [SAME if i in numbers else label for i, label in enumerate(labels)]
        found = rule(Operation(op, labels, self))
        return found and self._trusted(op, found)

    def _has_copies(self, op: tf.Operation) -> bool:
        """Return whether each device has the variables that an operation reads."""
        resources = (x.name for x in op.inputs if x.dtype == tf.resource)
        return self.is_body or all(name in self._replicated for name in resources)

    def _trusted(self, op: tf.Operation, found: list[Any]) -> list[Any] | None:
        """Return what a rule has found, unless the inferred lengths contradict it."""
        for x, label in zip(op.outputs, found, strict=True):
            axis, wanted = self.axes.get(x.name), getattr(label, "axis", None)
            if isinstance(label, Split) and axis != wanted:
                is_known = x.shape.rank is not None and x.shape[wanted] is not None
                if is_known or axis is not None:
                    return None
            if label is PARTIAL and axis is not None:
                return None
            # Parts of unknown rank cannot be joined.
            if isinstance(label, Split) and x.shape.rank is None and not self.is_body:
                return None
        return found


_READS = ("ReadVariableOp", "VariableShape")


def _is_stateful(op: tf.Operation) -> bool:
    is_harmless = op.type in _rules.STATELESS_IN_EFFECT or op.type in _READS
    return bool(op.op_def.is_stateful) and not is_harmless
