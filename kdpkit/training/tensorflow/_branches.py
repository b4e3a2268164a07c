"""What a step does that a few examples may not show, found in its graph.

What is a mean over the examples may be computed by each replica on its own. What is divided by a
number of all examples, compared with one, or chosen by one may come out alike in the examples of
the verification, and differ later: where all have a label first, where no norm is too large yet.
So the way from the examples to the losses is read: a tensor that has no axis of examples any more,
but depends on them, may only be added to others, and multiplied by what does not depend on them.

The axis of examples is the one of unknown length. Layers of libraries are taken to compute
examples one by one, and are not looked into.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

_OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
# Linear in all of their inputs together, and linear in one of them.
_ADDITIVE = frozenset(
    {"Identity", "IdentityN", "Neg", "AddV2", "AddN", "Add", "Sub", "Reshape", "Squeeze", "Sum"}
    | {"ExpandDims", "Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "StridedSlice"}
    | {"StopGradient", "PreventGradient", "BroadcastTo", "Mean", "Pad", "Fill", "Tile", "Cast"}
    | {"UnsortedSegmentSum", "GatherV2", "EnsureShape", "CheckNumerics", "Slice"}
)
_MULTIPLYING = frozenset({"Mul", "MatMul", "BatchMatMulV2", "BatchMatMulV3", "MulNoNan", "Einsum"})
_DIVIDING = frozenset({"RealDiv", "DivNoNan", "Div"})
_SUMMING = _MULTIPLYING | {"L2Loss", "SegmentSum", "SparseTensorDenseMatMul", "BiasAddGrad"}
_MIXING = frozenset(
    {"Where", "UniqueV2", "Unique", "DynamicPartition", "DenseBincount", "Bincount"}
)
_ELEMENTWISE = frozenset(
    {"Mul", "AddV2", "Sub", "RealDiv", "Maximum", "Minimum", "Greater", "GreaterEqual", "Less"}
    | {"LessEqual", "Equal", "NotEqual"}
)
# Along an axis, which is the input at this position.
_ALONG = {"Cumsum": 1, "Cumprod": 1, "ReverseV2": 1, "GatherV2": 2, "SplitV": 2, "Split": 0}


class Graph:
    """The graph of a step, and which of its tensors depend on the examples of a replica.

    Args:
        graph: The graph.
        trial: What the step noted while it was traced: its examples, what all replicas have alike,
            and inputs and outputs of the layers that are not looked into.
    """

    def __init__(self, graph: Any, trial: Any) -> None:
        self.operations = graph.get_operations()
        self.inputs_of_layers = {_key(x): given for given, outputs in trial.layers for x in outputs}
        self.of_examples = set(map(_key, trial.examples))
        self.assigning = [op for op in self.operations if op.type.startswith("Assign")]
        stopping = set(map(_key, trial.shared))
        for operation in self.operations:
            if operation.type in _OF_SHAPES:
                continue
            given = [self.depends(x) for x in operation.inputs]
            if operation.type.startswith("Assign") and given[1]:
                self.of_examples.add(_key(operation.inputs[0]))  # what is read from it later
            each = given if operation.type == "IdentityN" else [any(given)] * len(operation.outputs)
            keys = [_key(x) for x, depends in zip(operation.outputs, each, strict=True) if depends]
            self.of_examples.update(key for key in keys if key not in stopping)

    def depends(self, tensor: Any) -> bool:
        """Tell whether a tensor depends on the values of examples."""
        return _key(tensor) in self.of_examples

    def is_whole(self, tensor: Any) -> bool:
        """Tell whether a tensor depends on examples and has no axis of them."""
        if not self.depends(tensor) or _key(tensor) in self.inputs_of_layers:
            return False
        return tensor.shape.rank == 0 or (bool(tensor.shape.rank) and tensor.shape[0] is not None)

    def unfit(self, roots: Iterable[Any]) -> str | None:
        """Name an operation on the way to some tensors that is not for each replica alone."""
        waiting, seen = [*roots], set()
        while waiting:
            tensor = waiting.pop()
            if _key(tensor) in seen or not self.depends(tensor):
                continue
            seen.add(_key(tensor))
            of_layer = self.inputs_of_layers.get(_key(tensor))
            if of_layer is None and not self.is_fit(tensor):
                return tensor.op.type
            waiting += _inputs(tensor) if of_layer is None else of_layer
        return None

    def is_fit(self, tensor: Any) -> bool:
        """Tell whether what gives a tensor may be done by each replica on its own examples."""
        kind = tensor.op.type
        given = [x for x in _inputs(tensor) if self.depends(x)]
        if not given:  # examples themselves
            return True
        if not any(map(self.is_whole, given)):
            is_sum = kind in _ADDITIVE or kind in _SUMMING
            return (is_sum or not self.is_whole(tensor)) and not _is_mixing(tensor.op, given)
        if kind in _ADDITIVE:
            is_rounded = tensor.dtype.is_integer and given[0].dtype.is_floating
            return all(map(self.is_whole, given)) and not is_rounded
        is_numerator = kind in _DIVIDING and not self.depends(tensor.op.inputs[1])
        return len(given) == 1 and (kind in _MULTIPLYING or is_numerator)

    def is_linear(self, tensor: Any, of: frozenset[Any]) -> bool:
        """Tell whether a tensor is linear in some others, if it depends on examples."""
        if _key(tensor) in of or not self.depends(tensor):
            return True
        kind = tensor.op.type
        inputs = [x for x in _inputs(tensor) if not x.dtype.is_integer and self.depends(x)]
        if (kind in _MULTIPLYING and len(inputs) > 1) or (
            kind in _DIVIDING and self.depends(tensor.op.inputs[1])
        ):
            return False
        linear = kind in _ADDITIVE or kind in _MULTIPLYING or kind in _DIVIDING
        return linear and all(self.is_linear(x, of) for x in inputs)


def _is_mixing(operation: Any, given: list[Any]) -> bool:
    """Tell whether an operation on tensors of examples moves one of them to another's position."""
    kind = operation.type
    if kind in _ELEMENTWISE:
        return len({x.shape.rank for x in given}) > 1
    if kind == "TopKV2":
        return given[0].shape.rank == 1
    if kind == "StridedSlice" and operation.inputs[0] is given[0]:
        of_all = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")
        begins, ends, *others = (operation.get_attr(name) & 1 for name in of_all)
        return not (begins and ends) and not any(others)
    if kind in _ALONG and operation.inputs[0 if _ALONG[kind] else 1] is given[0]:
        axes = tf.get_static_value(operation.inputs[_ALONG[kind]])
        rank = given[0].shape.rank
        return axes is None or rank is None or any(axis % rank == 0 for axis in np.ravel(axes))
    return kind in _MIXING


def problem(graph: Graph, trial: Any, foreign: Iterable[str]) -> str | None:
    """Say what a step does that depends on the cut for other examples, perhaps.

    Args:
        graph: The graph of the step.
        trial: What the step noted while it was traced.
        foreign: The names of the variables' handles that nobody but libraries assigns.
    """
    of = frozenset(map(_key, map(_values, trial.of_tape)))
    if not all(graph.is_linear(tensor, of) for tensor in map(_values, trial.applied)):
        return "The step changes gradients before the optimizer gets them"
    foreign = set(foreign)
    assigned = [op.inputs[1] for op in graph.assigning if op.inputs[0].name not in foreign]
    if (operation := graph.unfit([*trial.roots, *assigned])) is not None:
        return f"The step computes with one number of all examples, or chooses by it ({operation})"
    return None


def _inputs(tensor: Any) -> list[Any]:
    inputs = [*tensor.op.inputs]
    return [inputs[tensor.value_index]] if tensor.op.type == "IdentityN" else inputs


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _key(tensor: Any) -> tuple[str, int]:
    return tensor.op.name, tensor.value_index
