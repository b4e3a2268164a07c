"""Operations that compute each entry by itself are repeated on the parts of their inputs.

What a step or a user's block computes between two divided layers, such as an activation or a sum
with a shortcut, would otherwise be computed for all examples on one device. It is repeated where
the parts of its result are asked for; TensorFlow leaves out the original, which nobody uses then.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow._keras_internals import repeat_operation

# Each entry of the output depends only on the entries at the same position.
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
    rank, devices = operation.outputs[0].shape.rank, step.mesh.devices
    first, inputs = None, []
    for x in operation.inputs:
        parts = known_parts(step, x)
        if parts is None:  # Then it must be the same for all examples.
            if x.shape.rank is None or (x.shape.rank >= rank and x.shape[0] != 1):
                return None
            inputs.append([x] * len(devices))
            continue
        first = first or parts
        if x.shape.rank != rank or parts.split.length_id != first.split.length_id:
            return None
        inputs.append(parts.tensors)
    if first is None:
        return None
    of_devices = zip(devices, *inputs, strict=True)
    return first._replace(
        tensors=[repeat_operation(operation, tensors, device) for device, *tensors in of_devices]
    )


def _unbroadcast(step: Any, operation: Any, known_parts: Callable) -> Any:
    """Recognize the gradient of an input that might be broadcast, and is not: the gradient itself.

    TensorFlow sums it over the axes of a broadcast, which it does not know beforehand.
    """
    total, shape = operation.inputs
    if total.op.type != "Sum" or shape.op.type != "Shape":
        return None
    upstream, axes = total.op.inputs
    if axes.op.type != "BroadcastGradientArgs":
        return None
    tensor, static = shape.op.inputs[0], upstream.shape
    is_same = tensor.shape.rank == static.rank and tensor.shape[1:] == static[1:]
    if not is_same or not tensor.shape[1:].is_fully_defined():
        return None
    parts, parts_of_tensor = known_parts(step, upstream), known_parts(step, tensor)
    if parts is None or parts_of_tensor is None:
        return None
    return parts if parts.split.length_id == parts_of_tensor.split.length_id else None
