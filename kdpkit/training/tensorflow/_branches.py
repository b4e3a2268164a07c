"""What a step does that a few examples may not show, found in its graph.

A number of a whole batch, such as a mean loss or a gradient, that a step compares, clips or takes
the larger of, may lie on one side in the examples of the verification, and on the other later.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

_OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_COMPARING = frozenset(
    {"Maximum", "Minimum", "Relu", "Relu6", "Abs", "Sign", "Floor", "Ceil", "Round", "ClipByValue"}
    | {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
)
_CHOOSING = frozenset({"Select", "SelectV2", "If", "StatelessIf", "Case", "StatelessCase"})
# Linear in all of their inputs together, and linear in one of them.
_ADDITIVE = frozenset(
    {"Identity", "IdentityN", "Cast", "Neg", "AddV2", "AddN", "Add", "Sub", "Reshape", "Squeeze"}
    | {"ExpandDims", "Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "StridedSlice"}
    | {"StopGradient", "BroadcastTo", "UnsortedSegmentSum", "Sum", "Mean", "GatherV2", "Pad"}
)
_MULTIPLYING = frozenset({"Mul", "MatMul", "BatchMatMulV2", "MulNoNan"})
_DIVIDING = frozenset({"RealDiv", "DivNoNan", "Div"})


class Graph:
    """The graph of a step, and which of its operations depend on the examples of a replica.

    Args:
        graph: The graph.
        examples: The tensors that the examples come in.
        shared: Tensors that all replicas have alike.
    """

    def __init__(self, graph: Any, examples: Iterable[Any], shared: Iterable[Any]) -> None:
        self.operations = graph.get_operations()
        self.of_examples = set(map(_key, examples))
        stopping = set(map(_key, shared))
        for operation in self.operations:
            if operation.type in _OF_SHAPES:
                continue
            given = [self.depends(x) for x in operation.inputs]
            each = given if operation.type == "IdentityN" else [any(given)] * len(operation.outputs)
            keys = [_key(x) for x, depends in zip(operation.outputs, each, strict=True) if depends]
            self.of_examples.update(key for key in keys if key not in stopping)
        assigning = [op for op in self.operations if op.type.startswith("Assign")]
        self.used = _leading_to([*(x.op for x in graph.outputs), *assigning])

    def depends(self, tensor: Any) -> bool:
        """Tell whether a tensor depends on the values of examples."""
        return _key(tensor) in self.of_examples

    def compares_single_numbers(self) -> bool:
        """Tell whether an operation compares a single number that depends on the examples."""
        return any(
            self.depends(compared) and compared.shape.num_elements() == 1
            for operation in self.operations
            if operation.name in self.used
            for compared in _compared(operation)
        )

    def is_linear(self, tensor: Any, of: frozenset[Any]) -> bool:
        """Tell whether a tensor is linear in some others, if it depends on examples."""
        if _key(tensor) in of or not self.depends(tensor):
            return True
        kind = tensor.op.type
        inputs = tensor.op.inputs
        if kind == "IdentityN":
            inputs = [inputs[tensor.value_index]]
        inputs = [x for x in inputs if not x.dtype.is_integer and self.depends(x)]
        if (kind in _MULTIPLYING and len(inputs) > 1) or (
            kind in _DIVIDING and self.depends(tensor.op.inputs[1])
        ):
            return False
        linear = kind in _ADDITIVE or kind in _MULTIPLYING or kind in _DIVIDING
        return linear and all(self.is_linear(x, of) for x in inputs)


def _compared(operation: Any) -> list[Any]:
    """List the inputs that an operation compares, with each other or with a constant."""
    if operation.type in _COMPARING:
        return [x for x in operation.inputs if x.dtype.is_floating]
    return operation.inputs[:1] if operation.type in _CHOOSING else []


def _leading_to(operations: list[Any]) -> set[str]:
    """Name the operations from which some others come, and these."""
    used: set[str] = set()
    while operations:
        operation = operations.pop()
        if operation.name not in used:
            used.add(operation.name)
            operations += [x.op for x in operation.inputs]
    return used


def problem(graph: Graph, of_tape: Iterable[Any], applied: Iterable[Any]) -> str | None:
    """Say what a step does that depends on the cut for other examples, perhaps.

    Args:
        graph: The graph of the step.
        of_tape: Gradients as tapes gave them.
        applied: Gradients as optimizers got them.
    """
    of = frozenset(map(_key, map(_values, of_tape)))
    if not all(graph.is_linear(tensor, of) for tensor in map(_values, applied)):
        return "The step changes gradients before the optimizer gets them"
    if graph.compares_single_numbers():
        return "The step compares one number of all examples, such as a mean loss, with another"
    return None


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _key(tensor: Any) -> tuple[str, int]:
    return tensor.op.name, tensor.value_index
