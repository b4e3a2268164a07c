"""What a step does that a few examples may not show, found in its graph.

What is a mean over the examples may be computed by each replica on its own. What is divided by a
number of all examples, compared with one, or chosen by one may come out alike in the examples of
the verification, and differ later: where all have a label first, where no norm is too large yet.
So the way from the examples to the losses is read, operation by operation (`_graph_axes`).

Layers of libraries compute examples one by one, if they get them along the first axis, and are not
looked into.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._global_batch import is_library
from kdpkit.training.tensorflow._graph_axes import (
    CHOSEN,
    FLAT,
    MEAN,
    NOT_COUNTED,
    SUM,
    UNFIT,
    axis_of,
    count_in,
    is_linear,
)
from kdpkit.training.tensorflow._keras_internals import functions_of, origin_of_gradient

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "Case", "While")  # which may assign what they are given


class StepGraph:
    """The graph of a step, with the axis of the examples in each of its tensors.

    Args:
        graph: The graph.
        axes: That of the examples themselves, by tensor.
        shared: Tensors that all replicas have alike.
        layers: Inputs and outputs of the layers that are not looked into.
        counted: Inputs of the graph into which a number of examples has gone, and how.
    """

    def __init__(
        self,
        graph: tf.Graph,
        axes: dict[Any, int],
        shared: Iterable[Any] = (),
        layers: Iterable[tuple[list[Any], list[Any]]] = (),
        counted: Mapping[Any, int] | None = None,
    ) -> None:
        self.axes = axes
        self.unfit: dict[Any, str] = {}  # by tensor: the operation that made it so
        self.assigned: list[tuple[Any, int, str]] = []  # handles, what they are given, by what
        self.counted = {**(counted or {})}
        self._shared = {_key(tensor) for tensor in shared}
        self._examples = set(axes)
        self._inputs_of_layers = {
            _key(output): inputs
            for inputs, outputs in layers
            for output in outputs
            if _key(output) not in map(_key, inputs)  # as a Dropout gives it outside of training
        }
        for operation in graph.get_operations():
            self._read(operation)

    def axis(self, tensor: tf.Tensor) -> int | None:
        """Return the label of a tensor; None if it does not depend on examples."""
        return self.axes.get(_key(tensor))

    def _read(self, operation: tf.Operation) -> None:
        given = [self.axis(x) for x in operation.inputs]
        if operation.type.startswith("Assign") and given[1] is not None:
            self._assign(operation.inputs[0], given[1], self._cause(operation))
        elif operation.type in _BRANCHES and any(axis is not None for axis in given):
            for handle in _assigned_inside(operation):
                self._assign(handle, UNFIT, operation.type)
        counted = [self.counted.get(_key(x), NOT_COUNTED) for x in operation.inputs]
        count = NOT_COUNTED if operation.type in _CALLS else count_in(operation, given, counted)
        found = self._called(operation, given) if operation.type in _CALLS else None
        for position, output in enumerate(operation.outputs):
            key = _key(output)
            if key in self._examples:
                continue
            if count and key not in self._inputs_of_layers:
                self.counted[key] = count
            if key in self._shared:
                continue
            if key in self._inputs_of_layers:
                label = self._after_layer(output, self._inputs_of_layers[key])
            elif found is not None:
                label = found[position]
            elif operation.type == "IdentityN":
                label = self._after_identity(operation, given[position])
            elif operation.type == "Range" and any(counted):
                label = UNFIT  # positions in the batch
            else:
                label = axis_of(output, given, counted)
                label = UNFIT if label is not None and count == CHOSEN else label
            if label is not None:
                self._set(output, label, self._cause(operation))

    def _assign(self, handle: tf.Tensor, label: int, cause: str) -> None:
        self.assigned.append((handle, label, cause))
        self._set(handle, UNFIT, cause)  # what is read from it later

    def _set(self, tensor: tf.Tensor, label: int, cause: str) -> None:
        self.axes[_key(tensor)] = label
        if label == UNFIT:
            self.unfit[_key(tensor)] = cause

    def _cause(self, operation: tf.Operation) -> str:
        causes = [self.unfit[_key(x)] for x in operation.inputs if _key(x) in self.unfit]
        return causes[0] if causes else operation.type

    def _after_layer(self, output: tf.Tensor, inputs: list[Any]) -> int | None:
        given = {self.axis(x) for x in inputs} - {None}
        if not given:
            return None
        if given == {FLAT}:
            return FLAT
        return 0 if given == {0} and output.shape.rank != 0 else UNFIT

    def _after_identity(self, operation: tf.Operation, given: int | None) -> int | None:
        """Follow a value that has a gradient of its own; the user's may clip what it is given."""
        origin = origin_of_gradient(operation)
        is_of_library = origin is None or is_library(origin)
        return given if given is None or is_of_library else UNFIT

    def _called(self, operation: tf.Operation, given: list[int | None]) -> list[int | None] | None:
        """Read a function that the step calls; None if it is not known."""
        (inner, *_) = functions_of(operation) or [None]
        if inner is None or len(inner.inputs) != len(given):
            is_known = not any(axis is not None for axis in given)
            return [None] * len(operation.outputs) if is_known else None
        axes = {
            _key(x): axis for x, axis in zip(inner.inputs, given, strict=True) if axis is not None
        }
        counted = self._counts_of(operation.inputs, inner.inputs)
        if not axes and not counted:
            return [None] * len(operation.outputs)
        read = StepGraph(inner, axes, counted=counted)
        self.counted |= read._counts_of(inner.outputs, operation.outputs)
        outside = {_key(x): y for x, y in zip(inner.inputs, operation.inputs, strict=True)}
        for handle, label, cause in read.assigned:
            if _key(handle) in outside:
                self._assign(outside[_key(handle)], label, cause)
        return [read.axis(output) for output in inner.outputs]

    def _counts_of(self, tensors: Sequence[Any], others: Sequence[Any]) -> dict[Any, int]:
        """Return what is counted in tensors, for those that have the same values elsewhere."""
        return {
            _key(other): self.counted[_key(tensor)]
            for tensor, other in zip(tensors, others, strict=True)
            if _key(tensor) in self.counted
        }

    def is_linear(self, tensor: tf.Tensor, of: frozenset[Any]) -> bool:
        """Return whether a tensor is linear in some others, if it depends on examples."""
        waiting, seen = [tensor], set(of)
        while waiting:
            tensor = waiting.pop()
            if _key(tensor) in seen or self.axis(tensor) is None:
                continue
            seen.add(_key(tensor))
            inputs = [*tensor.op.inputs]
            if tensor.op.type == "IdentityN":
                inputs = [inputs[tensor.value_index]]
            elif not is_linear(tensor, [self.axis(x) for x in inputs]):
                return False
            waiting += [x for x in inputs if x.dtype.is_floating]
        return True


def problem(
    graph: tf.Graph, trial: Any, foreign: Iterable[str], adding: Iterable[str]
) -> str | None:
    """Name what a step does that may depend on how other batches are split.

    Args:
        graph: The graph of the step.
        trial: What the step noted while it was traced.
        foreign: The names of the variables' handles that nobody but libraries assigns.
        adding: Those of variables that add up what the replicas assign, as a metric's do.
    """
    axes = {_key(tensor): axis for tensor, axis in trial.examples}
    step = StepGraph(graph, axes, trial.shared, trial.layers)
    of = frozenset(map(_key, map(_values, trial.of_tape)))
    if not all(step.is_linear(tensor, of) for tensor in map(_values, trial.applied)):
        return "The step changes gradients before the optimizer gets them"
    foreign, adding = set(foreign), set(adding)
    assigned = [
        (label, cause)
        for handle, label, cause in step.assigned
        if handle.op.name not in foreign and not (label == SUM and handle.op.name in adding)
    ]
    labels = [step.axis(root) for root in trial.roots] + [label for label, _ in assigned]
    causes = [step.unfit[_key(root)] for root in trial.roots if step.axis(root) == UNFIT]
    causes += [cause for label, cause in assigned if label == UNFIT]
    if causes:
        return f"The step may compute with a number of all examples, or choose by it ({causes[0]})"
    if SUM in labels:
        return "The step adds up its examples, and may not divide by how many there are"
    return None


def _assigned_inside(operation: tf.Operation) -> list[Any]:
    """List the handles of variables that the functions of an operation assign."""
    found = []
    for graph in functions_of(operation):
        given = operation.inputs[len(operation.inputs) - len(graph.inputs) :]
        outside = {_key(x): y for x, y in zip(graph.inputs, given, strict=True)}
        for inner in graph.get_operations():
            is_assignment = inner.type.startswith("Assign")
            handles = [inner.inputs[0]] if is_assignment else _assigned_inside(inner)
            found += [outside[_key(handle)] for handle in handles if _key(handle) in outside]
    return found


def labels_of(leaf: Any) -> list[tuple[Any, int]]:
    """Label what a part of a batch consists of, as the examples of a step."""
    if isinstance(leaf, tf.Tensor):
        return [(leaf, 0 if leaf.shape.rank else MEAN)]
    return [(part, FLAT) for part in tf.nest.flatten(leaf, expand_composites=True)]


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _key(tensor: tf.Tensor) -> tuple[str, int]:
    return tensor.op.name, tensor.value_index
