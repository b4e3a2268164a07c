"""Operations that compute each entry, or each example, by itself are repeated on the parts.

What a step or a block of the user's computes between two divided layers, such as an activation or a
sum with a shortcut, would else be computed for all examples on one device. It is looked up where
the parts of its result are asked for; the operation itself is then used by nobody, and left out.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import repeat_operation

# Of these each entry of the output depends on the entries at its place.
_ENTRY_BY_ENTRY = (
    "Abs Add AddN AddV2 Atan Cast Ceil Cos Cosh Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor "
    "Identity Inv IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Log Log1p Maximum Minimum Mul "
    "MulNoNan Neg OnesLike Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad "
    "Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad "
    "Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad Xdivy "
    "Xlogy ZerosLike Equal Greater GreaterEqual Less LessEqual LogicalAnd LogicalNot LogicalOr "
    "NotEqual SelectV2 StopGradient CheckNumerics"
)
_REPEATED = frozenset(_ENTRY_BY_ENTRY.split(" "))


def repeated(step: Any, tensor: Any, known_parts: Callable) -> Any:
    """Return the parts of a tensor whose operation can be repeated on those of its inputs."""
    operation = tensor.op
    if tensor.graph is not tf.compat.v1.get_default_graph():
        return None
    if operation.type in _REPEATED:
        return _entry_by_entry(step, operation, known_parts)
    if operation.type == "Reshape":
        return _unbroadcast(step, operation, known_parts)
    return None


def _entry_by_entry(step: Any, operation: Any, known_parts: Callable) -> Any:
    inputs = [*operation.inputs]
    parts = [known_parts(step, x) for x in inputs]
    known = [part for part in parts if part is not None]
    if not known or any(part.split.length_id != known[0].split.length_id for part in known):
        return None
    rank = operation.outputs[0].shape.rank
    for x, part in zip(inputs, parts, strict=True):
        is_for_all = x.shape.rank is not None and (x.shape.rank < rank or x.shape[0] == 1)
        if x.shape.rank != rank if part is not None else not is_for_all:
            return None
    taken = [
        [x] * len(step.mesh.devices) if part is None else part.tensors
        for x, part in zip(inputs, parts, strict=True)
    ]
    return known[0]._replace(
        tensors=[
            repeat_operation(operation, [of[index] for of in taken], device)
            for index, device in enumerate(step.mesh.devices)
        ],
    )


def _unbroadcast(step: Any, operation: Any, known_parts: Callable) -> Any:
    """Recognize the gradient of what was perhaps broadcast, and was not: the gradient itself.

    TensorFlow sums it over the axes of a broadcast, which it does not know beforehand.
    """
    total, shape = operation.inputs
    if total.op.type != "Sum" or shape.op.type != "Shape":
        return None
    upstream, axes = total.op.inputs
    if axes.op.type != "BroadcastGradientArgs":
        return None
    parts = known_parts(step, upstream)
    tensor = shape.op.inputs[0]
    is_same = tensor.shape.rank == upstream.shape.rank and tensor.shape[1:] == upstream.shape[1:]
    if parts is None or not is_same or not tensor.shape[1:].is_fully_defined():
        return None
    own = known_parts(step, tensor)
    return parts if own is not None and own.split.length_id == parts.split.length_id else None
