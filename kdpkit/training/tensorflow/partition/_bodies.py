"""Loops and conditions, which each device runs on its parts if nothing in them needs others'."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import function_def_to_graph, handle_data_util
from kdpkit.training.tensorflow.partition import _inference, _traced_step
from kdpkit.training.tensorflow.partition._labelling import LabelledGraph
from kdpkit.training.tensorflow.partition._labels import (
    NEW_LIST,
    PARTIAL,
    SAME,
    SIZE,
    WHOLE,
    ListOf,
    Operation,
    Split,
    is_divided,
    is_size,
)

_MOST_ROUNDS = 9  # until the labels of a loop's variables stay as they are


class Bodies:
    """The functions of a step's loops and conditions, and what was found of them.

    Args:
        step: The traced step.
        longer: How many examples the second graph of each function is for.

    Attributes:
        inputs: The labels with which a loop or condition is run in parts, by its name.
        failed: The operations for which devices need the examples of others.
    """

    def __init__(self, step: Any, longer: int) -> None:
        self._graph, self._longer = step.graph, longer
        library = step.graph_def.library.function
        self._functions = {function.signature.name: function for function in library}
        self.inputs: dict[str, list[Any]] = {}
        self.failed: list[tf.Operation] = []

    def labels_of(self, operation: Operation) -> list[Any] | None:
        """Label the outputs of a loop, condition or call; None if it is computed whole."""
        labels = [*operation.labels]
        is_loop, is_call = "While" in operation.kind, operation.kind.endswith("PartitionedCall")
        of_kind = self._of_loop if is_loop else self._of_call if is_call else self._of_condition
        are_known = not any(label in (WHOLE, SIZE) for label in labels)
        found = of_kind(operation, labels) if are_known else None
        is_body = operation.graph.is_body
        if found and not is_body:  # Others cannot read what devices count.
            pairs = zip(operation.outputs, found[1], strict=True)
            found = None if any(is_size(label) and x.consumers() for x, label in pairs) else found
        if found and any(
            isinstance(label, Split) and x.shape.rank is None
            for x, label in zip(operation.outputs, found[1], strict=True)
        ):  # Parts of unknown rank cannot be joined: a vector of sizes has an entry for each axis.
            found = None
        if found is None:
            if any(map(is_divided, labels)):
                self.failed.append(operation.op)
            return None
        inputs, outputs = found
        if not is_body:
            self.inputs[operation.op.name] = inputs
        return outputs if any(map(is_divided, [*inputs, *outputs])) else None

    def graphs_of(self, op: tf.Operation) -> Iterator[Any]:
        """Yield the graphs of what a loop, condition or call runs."""
        for attribute in {"body", "then_branch", "else_branch", "f"} & {*op.node_def.attr}:
            inputs = op.inputs[attribute.endswith("branch") :]  # without the condition
            yield self._imported(self._functions[op.get_attr(attribute).name], inputs)[0]

    def _of_condition(self, operation: Operation, labels: list[Any]) -> Any:
        if not operation.graph.is_body:
            labels = [SAME if label is PARTIAL else label for label in labels]
        if labels[0] is not SAME or PARTIAL in labels:
            return None
        found = []
        for branch in ("then_branch", "else_branch"):
            body = self._body(operation, branch, operation.inputs[1:])
            found.append(self._labelled(body, labels[1:]))
        return (labels, found[0]) if found[0] is not None and found[0] == found[1] else None

    def _of_call(self, operation: Operation, labels: list[Any]) -> Any:
        """Label the call of a function that XLA compiles; others are part of the graph."""
        if not operation.graph.is_body:
            labels = [SAME if label is PARTIAL else label for label in labels]
        body = self._body(operation, "f", operation.inputs)
        found = None if PARTIAL in labels else self._labelled(body, labels)
        return found and (labels, found)

    def _of_loop(self, operation: Operation, labels: list[Any]) -> Any:
        body = self._body(operation, "body", operation.inputs)
        zeros = {i for i, x in enumerate(operation.inputs) if _is_zero(x)}
        for _ in range(_MOST_ROUNDS):
            after = self._labelled(body, labels, zeros)
            if after is None:
                return None
            joined = [
                _joined(a, b, i in zeros)
                for i, (a, b) in enumerate(zip(labels, after, strict=True))
            ]
            if None in joined:
                return None
            if joined == labels:
                break
            labels = joined
        # They are zero in the first round only.
        if joined != labels or self._labelled(body, labels) != after:
            return None
        # What decides whether the loop goes on has to be the same on all devices.
        condition = self._labelled(self._body(operation, "cond", operation.inputs), labels)
        return (labels, labels) if condition == [SAME] else None

    def _body(self, operation: Operation, attribute: str, inputs: Sequence[tf.Tensor]) -> Any:
        """Return a function's graphs for both lengths, with its inputs and outputs."""
        name = operation.attr(attribute).name
        function = self._functions[name]
        second = operation.graph.second
        pairs = [[*inputs], [second.get_tensor_by_name(x.name) for x in inputs]]
        return [self._imported(function, tensors) for tensors in pairs]

    def _imported(self, function: Any, outer: Sequence[tf.Tensor]) -> Any:
        with self._graph.as_default():
            body, flat_names = function_def_to_graph.function_def_to_graph_def(function)
        nodes, renamed = _traced_step.inlined(self._graph, body.node, self._functions)
        arguments = [argument.name for argument in function.signature.input_arg]
        graph_def = type(body)(versions=body.versions)
        graph_def.library.function.extend(self._functions.values())
        graph_def.node.extend(node for node in nodes if node.name not in arguments)
        graph = tf.Graph()
        with graph.as_default():
            inputs = {}
            for name, x in zip(arguments, outer, strict=True):
                inputs[f"{name}:0"] = tf.compat.v1.placeholder(x.dtype, x.shape, name=name)
                self._copy_handle_data(x, inputs[f"{name}:0"])
            _inference.import_nodes(graph_def, inputs)
        flat = [flat_names[function.ret[a.name]] for a in function.signature.output_arg]
        names = [renamed.get(name, name) for name in flat]
        return graph, [f"{name}:0" for name in arguments], names

    def _copy_handle_data(self, outer: tf.Tensor, inner: tf.Tensor) -> None:
        if outer.dtype not in (tf.resource, tf.variant):
            return
        data = handle_data_util.get_resource_handle_data(outer)
        if not data.is_set:  # Imported lists have lost it, and the traced graph has not.
            try:
                traced = self._graph.get_tensor_by_name(outer.name)
            except KeyError:
                return
            data = handle_data_util.get_resource_handle_data(traced)
        handle_data_util.set_handle_data(inner, data)

    def _labelled(
        self, body: Any, labels: list[Any], zeros: Collection[int] = ()
    ) -> list[Any] | None:
        """Return the labels of a function's outputs; None if it needs examples of others."""
        (first, inputs, outputs), (second, _, _) = body
        axes = _inference.axes_of(first, second, self._longer)
        inferred = _inference.Inferred((first, second), [], axes, False, self._longer)
        given = dict(zip(inputs, labels, strict=True))
        graph = LabelledGraph(inferred, given, self, zeros=[inputs[i] for i in zeros])
        needs_others = graph.whole or WHOLE in graph.labels.values()
        return None if needs_others else [graph.labels.get(name, SAME) for name in outputs]


def _joined(before: Any, after: Any, is_zero: bool) -> Any:
    """Return the label of a loop's variable, before its body and after it; None if none fits."""
    if after == before:
        return before
    if before is SAME and after is PARTIAL:
        return PARTIAL if is_zero else None
    if before is NEW_LIST and isinstance(after, ListOf):
        return after
    return before if after is NEW_LIST and isinstance(before, ListOf) else None


def _is_zero(x: tf.Tensor) -> bool:
    if x.op.type == "ZerosLike":
        return True
    if not (x.dtype.is_floating or x.dtype.is_complex):
        return False
    value = tf.get_static_value(x.op.inputs[1] if x.op.type == "Fill" else x)
    return value is not None and not np.any(value)
