"""What can be computed in parts: a rule for each family of operations.

A rule gets an operation of which at least one input is divided (unless it is `GENERATING`), and
returns the labels of its outputs; None if it needs examples of other devices. To all rules but that
of loops a sum of terms is `SAME`: `LINEAR` decides what is computed of terms. The law of every
rule: the operation on the parts of its inputs gives the parts of its outputs, or terms that add up
to them. A mean of a part becomes a term when it is written: `Writer._write_divided` scales it.
"""

import math
import string
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from kdpkit.training.tensorflow.partition._labels import (
    NEW_LIST,
    PARTIAL,
    SAME,
    SIZE,
    ListOf,
    Operation,
    ShapeOf,
    Split,
    is_list,
    is_size,
    known,
    static_axis,
)

Rule = Callable[[Operation], list[Any] | None]
RULES: dict[str, Rule] = {}


def kinds(names: str) -> frozenset[str]:
    """Return the kinds of operations that are named."""
    return frozenset(names.split())


# TensorFlow calls these stateful, because they read a variable or call functions.
STATELESS_IN_EFFECT = kinds("ResourceGather While If StatefulPartitionedCall")
READS = kinds("ReadVariableOp VariableShape ResourceGather ResourceGatherNd")
WITH_BODIES = kinds("While StatelessWhile If StatelessIf PartitionedCall StatefulPartitionedCall")
DRAWING = kinds("StatelessRandomUniformV2 StatelessRandomNormalV2")
# Worth to be divided although all examples are on the first device.
PRODUCTS = kinds(
    "MatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D Conv3D Conv2DBackpropInput "
    "Conv2DBackpropFilter Conv3DBackpropInputV2 Conv3DBackpropFilterV2 DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter"
)
HEAVY = PRODUCTS | WITH_BODIES | kinds("GatherV2 ResourceGather")
# They make tensors with examples of what is the same on all devices, such as a shape.
GENERATING = kinds(
    "Fill BroadcastTo StatelessRandomUniformV2 StatelessRandomNormalV2 EmptyTensorList "
    "TensorListReserve TensorListFromTensor TensorListSetItem TensorListPushBack ZerosLike "
    "BroadcastGradientArgs Tile While StatelessWhile"
)
# The operation on terms of a sum gives terms, which are added up later, or never. It needs a rule,
# too, for what is split.
LINEAR = kinds(
    "Reshape Identity Cast Neg Squeeze ExpandDims Transpose AddN AddV2 Add ConcatV2 MatrixBandPart "
    "Slice StridedSlice StridedSliceGrad"
)
# The inputs that are shapes or sizes of an output, or of entries of a list. They are computed for
# all examples, and each device gets the shape of its part instead (`Writer._argument`).
SHAPES: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Fill": (0,),
    "BroadcastTo": (1,),
    "Slice": (2,),
    "Tile": (1,),
    "StridedSliceGrad": (0,),
    "Conv2DBackpropInput": (0,),
    "Conv3DBackpropInputV2": (0,),
    "DepthwiseConv2dNativeBackpropInput": (0,),
    "AvgPoolGrad": (0,),
    "AvgPool3DGrad": (0,),
    "StatelessRandomUniformV2": (0,),
    "StatelessRandomNormalV2": (0,),
    "TensorListFromTensor": (1,),
    "TensorListGetItem": (2,),
    "TensorListPopBack": (1,),
    "TensorListStack": (1,),
}
# What they make of numbers of examples is right for other numbers, too: they move and multiply.
# A remainder or a minimum is not, though it may be one for all lengths that are inferred.
PROPORTIONAL = kinds(
    "Identity Cast Reshape Squeeze ExpandDims Pack Unpack ConcatV2 Split SplitV StridedSlice Slice "
    "GatherV2 Mul Prod DynamicStitch BroadcastArgs"
)
# What else may count a device's own examples in a loop, where a number is not that of all.
COUNTING: dict[str, tuple[int, ...]] = SHAPES | {
    "BroadcastGradientArgs": (0, 1),
    "Sum": (1,),
    "EmptyTensorList": (0,),
    "TensorListReserve": (0,),
    "TensorListPushBack": (1,),
    "TensorListSetItem": (2,),
}


def axis_of_shape(kind: str, source: Any, labels: Sequence[Any]) -> int | None:
    """Return which length of an input that is a shape counts examples.

    Args:
        kind: That of the operation.
        source: The label of its first input.
        labels: Those of its outputs.
    """
    if kind == "Tile" and isinstance(source, Split):  # It repeats along other axes.
        return None
    label = labels[-1].label if isinstance(labels[-1], ListOf) else labels[-1]
    return label.axis - (kind == "TensorListStack") if isinstance(label, Split) else None


def is_linear(op: tf.Operation, labels: list[Any], zeros: Collection[str]) -> bool:
    """Return whether an operation of the linear ones gives terms of a sum."""
    if op.type in ("AddN", "AddV2", "Add"):
        pairs = zip(op.inputs, labels, strict=True)
        return all(label is PARTIAL or x.name in zeros for x, label in pairs)
    if op.type == "ConcatV2":
        return all(label is PARTIAL for label in labels[:-1])
    if op.type == "Cast":
        x, y = op.inputs[0].dtype, op.outputs[0].dtype
        return bool(x.is_floating and y.is_floating and y.size >= x.size)
    value = labels[-1] if op.type == "StridedSliceGrad" else labels[0]
    return value is PARTIAL and labels.count(SAME) == len(labels) - 1


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for kinds of operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds(names), function))
        return function

    return register


# Each entry of the output is computed from the entries at its position of the inputs.


@rule(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd BitwiseAnd BitwiseOr "
    "BitwiseXor Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EluGrad "
    "Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Igamma "
    "Igammac Inv IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log "
    "Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter "
    "NotEqual OnesLike Polygamma Pow PreventGradient RGBToHSV HSVToRGB RealDiv Reciprocal "
    "ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 "
    "Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad "
    "Sqrt SqrtGrad Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad TruncateDiv "
    "TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta Real Imag Conj Complex ComplexAbs Angle "
    "Bitcast"
)
def entry_by_entry(op: Operation) -> list[Any] | None:
    if any(map(is_list, op.labels)):
        return _of_lists_entry_by_entry(op)
    ranks = [x.shape.rank for x in op.inputs]
    if not op.splits:
        return None
    if None in ranks:  # an entry of a list, which may be broadcast with others
        is_of_one_shape = len(ranks) == 1 or op.kind == "AddN"
        return [op.labels[0]] if is_of_one_shape and len({*op.labels}) == 1 else None
    found = _aligned(op)
    return found and found * len(op.outputs)


def _aligned(op: Operation) -> list[Any] | None:
    """Label the output of inputs whose axes are matched from the last one, as in broadcasts."""
    rank = op.outputs[0].shape.rank
    ends = {
        x.shape.rank - label.axis
        for x, label in zip(op.inputs, op.labels, strict=True)
        if isinstance(label, Split)
    }
    if rank is None or len(ends) != 1:
        return None
    (end,) = ends
    for x, label in zip(op.inputs, op.labels, strict=True):
        is_shared = not isinstance(label, Split)
        if is_shared and x.shape.rank >= end and x.shape[x.shape.rank - end] != 1:
            return None
    return [Split(rank - end)]


def _of_lists_entry_by_entry(op: Operation) -> list[Any] | None:
    if op.kind == "ZerosLike":
        return [NEW_LIST]
    if op.kind == "Identity":
        return [op.labels[0]]
    known = {label for label in op.labels if isinstance(label, ListOf)}
    if op.kind in ("AddN", "AddV2") and all(map(is_list, op.labels)) and len(known) <= 1:
        return [*known] or [NEW_LIST]
    return None


@rule("Select")
def select(op: Operation) -> list[Any] | None:
    """Choose entries; by a vector, which may be shorter than what it chooses from, examples."""
    ranks = {x.shape.rank for x in op.inputs}
    if len(ranks) > 1:
        return [Split(0)] if all(label == Split(0) for label in op.labels) else None
    return entry_by_entry(op)


@rule("EnsureShape")
def ensure_shape(op: Operation) -> list[Any] | None:
    label, shape = op.labels[0], tf.TensorShape(op.attr("shape"))
    is_any = isinstance(label, Split) and (shape.rank is None or shape[label.axis] is None)
    return [label] if is_any else None


# Each example by itself, along the first axis. The letters say what the inputs are: "x" has
# examples, "s" is shared by them, "a" is either, and "n" is a shape that counts them.
_INPUTS = {
    "xs": (
        "Conv2D Conv3D DepthwiseConv2dNative ResizeBilinear ResizeBicubic "
        "ResizeNearestNeighbor ResizeArea ResizeNearestNeighborGrad AdjustContrastv2 "
        "AdjustHue AdjustSaturation Dilation2D"
    ),
    "nsx": "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
    "x": (
        "MaxPool MaxPool3D AvgPool AvgPool3D LRN DepthToSpace SpaceToDepth "
        "ExtractImagePatches MatrixInverse Cholesky MatrixDeterminant LogMatrixDeterminant"
    ),
    "xxx": "MaxPoolGrad MaxPoolGradGrad MaxPool3DGrad MaxPool3DGradGrad LRNGrad",
    "nx": "AvgPoolGrad AvgPool3DGrad",
    "xx": (
        "ResizeBilinearGrad ResizeBicubicGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits MatrixSolve MatrixTriangularSolve"
    ),
    "xass": "ImageProjectiveTransformV3",
    "xxs": "InTopKV2",
}
_EXAMPLE_BY_EXAMPLE = {kind: letters for letters, names in _INPUTS.items() for kind in kinds(names)}


@rule(" ".join(_EXAMPLE_BY_EXAMPLE))
def example_by_example(op: Operation) -> list[Any] | None:
    allowed = {"x": (Split(0),), "s": (SAME,), "a": (SAME, Split(0))}
    for letter, label in zip(_EXAMPLE_BY_EXAMPLE[op.kind], op.labels, strict=True):
        if label not in allowed.get(letter, (label,)):
            return None
    least = 3 if op.kind.startswith(("Matrix", "Chol", "LogM")) else 4
    is_without_batch = op.kind.startswith(("Matrix", "Chol", "LogM", "Adjust"))
    if is_without_batch and (op.rank() or 0) < least:
        return None
    is_listed = op.kind.startswith("Image") and op.labels[1] is SAME  # a transformation for each
    if is_listed and op.shape(1)[0] != 1:
        return None
    return [Split(0)] * len(op.outputs)


# The last axis belongs together: of matrices the last two.

_OF_MATRICES = kinds("FFT2D IFFT2D MatrixBandPart MatrixDiagPartV3")


@rule("Softmax LogSoftmax TopKV2 FFT IFFT RFFT IRFFT Bucketize MatrixDiagV3")
@rule(" ".join(_OF_MATRICES))
def row_by_row(op: Operation) -> list[Any] | None:
    label, rank = op.labels[0], op.rank()
    num_together = 2 if op.kind in _OF_MATRICES else 1
    if not isinstance(label, Split) or rank is None or label.axis >= rank - num_together:
        return None
    return [label] * len(op.outputs) if op.are_same(*range(1, len(op.labels))) else None


# Sums over the examples: each device has a term.

_SUMMED = {
    "Conv2DBackpropFilter": (0, 2),
    "Conv3DBackpropFilterV2": (0, 2),
    "DepthwiseConv2dNativeBackpropFilter": (0, 2),
    "BiasAddGrad": (0,),
    "UnsortedSegmentSum": (0, 1),
}


@rule(" ".join(_SUMMED))
def summed(op: Operation) -> list[Any] | None:
    if op.kind == "BiasAddGrad":
        (label,), rank = op.labels, op.rank()
        channels = 1 if op.attr("data_format") == b"NCHW" else (rank or 0) - 1
        return None if label.axis == channels else [PARTIAL]
    divided = _SUMMED[op.kind]
    shared = {*range(len(op.labels))} - {*divided}
    are_divided = all(op.labels[i] == Split(0) for i in divided)
    return [PARTIAL] if are_divided and op.are_same(*shared) else None


@rule("L2Loss")
def sum_of_squares(op: Operation) -> list[Any]:
    return [PARTIAL] * len(op.outputs)


@rule("Sum Mean Max Min Prod All Any EuclideanNorm")
def reduction(op: Operation) -> list[Any] | None:
    label, value = op.labels[0], op.value(1)
    if not isinstance(label, Split):
        return None
    if value is None:
        return _unbroadcast(op, label.axis)
    rank = op.rank()
    if rank is None:
        return None
    over = {int(i) % rank for i in value.ravel()}
    return _reduced(op, label.axis, over)


def _reduced(op: Operation, axis: int, over: set[int]) -> list[Any] | None:
    if axis in over:
        # `Writer._write_divided` scales a part's mean by the device's share of the examples, which
        # the body of a loop or condition does not know.
        is_scaled = op.kind == "Mean" and not op.outputs[0].dtype.is_integer
        is_sum = op.kind == "Sum" or (is_scaled and not op.graph.is_body)
        return [PARTIAL] if is_sum else None
    return [Split(axis if op.attr("keep_dims") else axis - sum(i < axis for i in over))]


def _unbroadcast(op: Operation, axis: int) -> list[Any] | None:
    """Label the sum that makes the gradient of an input which may have been broadcast.

    It is a term if the input was repeated for all examples, as a bias is; an input that had
    examples gets those of its gradient. A `Reshape` gives the sum the input's shape, and has the
    same label.
    """
    users = op.outputs[0].consumers()
    are_gradients = op.inputs[1].op.type == "BroadcastGradientArgs" and op.kind == "Sum"
    if not are_gradients or any(user.type != "Reshape" for user in users):
        return None
    found = {_like_input(op, axis, user) for user in users}
    if len(found) != 1 or None in found:
        return None
    (label,) = op.graph.unbroadcast[op.outputs[0].name] = [*found]
    return [label]


def _like_input(op: Operation, axis: int, reshape: tf.Operation) -> Any:
    (y,), shape, rank = reshape.outputs, op.graph.of(reshape.inputs[1]), op.rank()
    if rank is None or y.shape.rank is None:
        return None
    position = axis - (rank - y.shape.rank)  # of the examples, in the input
    length = y.shape[position] if position >= 0 else 1
    if length == 1:
        return None if is_size(shape) or y.name in op.graph.axes else PARTIAL
    is_kept = length is not None and length == op.shape()[axis]
    return Split(position) if is_kept or shape == ShapeOf(position) else None


@rule("BroadcastGradientArgs")
def axes_of_broadcast(op: Operation) -> list[Any] | None:
    """Count a device's own examples in a loop, which sums of gradients may do."""
    if op.are_same(0, 1):
        return [SAME, SAME]
    users = [user for x in op.outputs for user in x.consumers()]
    is_of_sums = all(user.type == "Sum" for user in users)
    return [SIZE, SIZE] if is_of_sums or not op.graph.is_body else None


# Products of matrices.


@rule("MatMul")
def matrix_product(op: Operation) -> list[Any] | None:
    a, b = op.labels
    transposes = op.attr("transpose_a"), op.attr("transpose_b")
    return _product(a, b, (Split(int(transposes[0])), Split(int(not transposes[1]))), 0, 1)


@rule("BatchMatMulV2 BatchMatMulV3 BatchMatMul")
def product_of_batches(op: Operation) -> list[Any] | None:
    ranks, rank = [x.shape.rank for x in op.inputs], op.outputs[0].shape.rank
    if None in ranks or rank is None:
        return None
    from_end = {
        r - label.axis
        for r, label in zip(ranks, op.labels, strict=True)
        if isinstance(label, Split)
    }
    if min(from_end) > 2:
        return _aligned(op)
    if max(from_end) > 2:
        return None
    rows = Split(ranks[0] - 1 - (not op.attr("adj_x")))
    columns = Split(ranks[1] - 1 - bool(op.attr("adj_y")))
    a, b = op.labels
    return _product(a, b, (rows, columns), rank - 2, rank - 1, ranks)


def _product(
    a: Any,
    b: Any,
    outer: tuple[Split, Split],
    row: int,
    column: int,
    ranks: Sequence[int] = (2, 2),
) -> list[Any] | None:
    """Label a product of which rows or columns are divided, or what is summed over."""
    inner = [Split(2 * rank - 3 - axis.axis) for rank, axis in zip(ranks, outer, strict=True)]
    if [a, b] == inner:
        return [PARTIAL]
    if a == outer[0] and b is SAME:
        return [Split(row)]
    return [Split(column)] if b == outer[1] and a is SAME else None


@rule("Einsum")
def einsum(op: Operation) -> list[Any] | None:
    equation = op.attr("equation").decode().replace(" ", "")
    if "->" not in equation or any(x.shape.rank is None for x in op.inputs):
        return None
    terms, output = _terms_of(equation, [x.shape.rank for x in op.inputs])
    letters = {
        term[label.axis]
        for term, label in zip(terms, op.labels, strict=True)
        if isinstance(label, Split)
    }
    if len(letters) != 1:
        return None
    (letter,) = letters
    for term, label in zip(terms, op.labels, strict=True):
        is_split = isinstance(label, Split)
        if (
            (letter in term) != is_split
            or term.count(letter) > 1
            or not (is_split or label is SAME)
        ):
            return None
    return [Split(output.index(letter))] if letter in output else [PARTIAL]


def _terms_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of inputs and output, with some for the axes of an ellipsis."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    numbers = [rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True)]
    most = max((n for term, n in zip(terms, numbers, strict=True) if "." in term), default=0)
    letters = [letter for letter in string.ascii_letters if letter not in equation][:most]
    of_ellipsis = ["".join(letters[most - n :]) for n in numbers]
    pairs = zip(terms, of_ellipsis, strict=True)
    return [a.replace("...", b) for a, b in pairs], output.replace("...", "".join(letters))


# Shapes, and what moves entries.


@rule("Shape ShapeN Size Rank")
def sizes(op: Operation) -> list[Any]:
    if op.kind == "Rank":
        return [SAME]
    if op.kind == "Size":
        return [SIZE]
    return [ShapeOf(label.axis) if isinstance(label, Split) else SAME for label in op.labels]


@rule("Reshape")
def reshape(op: Operation) -> list[Any] | None:
    x, y, label = op.inputs[0], op.outputs[0], op.labels[0]
    if x.name in op.graph.unbroadcast:
        return op.graph.unbroadcast[x.name]
    to = op.axis_of_output()
    if not isinstance(label, Split) or is_list(op.labels[1]):
        return None
    if to is None or x.shape.rank is None:
        is_its_shape = op.labels[1] == ShapeOf(0) and label == Split(0)
        return [Split(0)] if is_its_shape and not y.shape.is_fully_defined() else None
    before = [x.shape[: label.axis], y.shape[:to]]
    if not all(shape.is_fully_defined() for shape in before):
        return None
    counts = {math.prod(shape.as_list()) for shape in before}
    return [Split(to)] if len(counts) == 1 else None


@rule("Transpose")
def transpose(op: Operation) -> list[Any] | None:
    """Follow the axis of examples; a gradient's order is that of the axes before."""
    source, axis = op.inputs[1].op, op.labels[0].axis
    is_inverse = source.type == "InvertPermutation"
    order = known(source.inputs[0]) if is_inverse else op.value(1)
    if order is None:
        return None
    return [Split(int(order[axis]) if is_inverse else [*order].index(axis))]


@rule("ExpandDims")
def expand_dims(op: Operation) -> list[Any] | None:
    axis, at = op.labels[0].axis, static_axis(op.value(1), op.outputs[0].shape.rank)
    return None if at is None else [Split(axis + (at <= axis))]


@rule("Squeeze")
def squeeze(op: Operation) -> list[Any] | None:
    axis, rank, gone = op.labels[0].axis, op.rank(), op.attr("squeeze_dims")
    if rank is None or not gone:
        return None
    gone = {i % rank for i in gone}
    return None if axis in gone else [Split(axis - sum(i < axis for i in gone))]


@rule("GatherV2 ResourceGather")
def gather(op: Operation) -> list[Any] | None:
    """Look up in what is shared, each device what its examples name; or along another axis."""
    table, indices = op.labels[:2]
    batch_dims = op.attr("batch_dims")
    if op.kind == "ResourceGather":
        return [indices] if isinstance(indices, Split) and not batch_dims else None
    rank, at = op.rank(), static_axis(op.value(2), op.rank())
    if at is None or rank is None:
        return None
    if table is SAME and isinstance(indices, Split):
        return [Split(at + indices.axis)] if not batch_dims else None
    if table == Split(0) == indices and batch_dims and at > 0:
        return [Split(0)]
    if isinstance(table, Split) and indices is SAME and not batch_dims and table.axis != at:
        added = (op.rank(1) or 0) - 1 if op.rank(1) is not None else None
        return None if added is None else [Split(table.axis + added * (table.axis > at))]
    return None


@rule("ArgMax ArgMin")
def position_of_extreme(op: Operation) -> list[Any] | None:
    axis, at = op.labels[0].axis, static_axis(op.value(1), op.rank())
    return None if at in (None, axis) else [Split(axis - (at < axis))]


@rule("Cumsum Cumprod")
def running_total(op: Operation) -> list[Any] | None:
    label, at = op.labels[0], static_axis(op.value(1), op.rank())
    return None if at in (None, label.axis) else [label]


@rule("ReverseV2 Roll")
def moved_along_axes(op: Operation) -> list[Any] | None:
    """Follow an axis of examples along which nothing moves; the last input has those that do."""
    (label, *others), at, rank = op.labels, op.value(len(op.inputs) - 1), op.rank()
    if at is None or rank is None or any(other is not SAME for other in others):
        return None
    return None if label.axis in {int(i) % rank for i in at.ravel()} else [label]


@rule("IdentityN")
def identities(op: Operation) -> list[Any] | None:
    """Pass all on, as functions with gradients of their own do."""
    are_passed = all(label is SAME or isinstance(label, Split) for label in op.labels)
    return [*op.labels] if are_passed else None


@rule("OneHot")
def one_hot(op: Operation) -> list[Any] | None:
    label, rank = op.labels[0], op.outputs[0].shape.rank
    if not op.are_same(1, 2, 3) or rank is None or not isinstance(label, Split):
        return None
    at = op.attr("axis") % rank
    return [Split(label.axis + (at <= label.axis))]


@rule("Pack")
def pack(op: Operation) -> list[Any] | None:
    if len({*op.labels}) != 1 or not op.splits:
        return None
    axis, rank = op.labels[0].axis, op.outputs[0].shape.rank
    return None if rank is None else [Split(axis + (op.attr("axis") % rank <= axis))]


@rule("Unpack")
def unpack(op: Operation) -> list[Any] | None:
    axis, rank = op.labels[0].axis, op.rank()
    if rank is None or op.attr("axis") % rank == axis:
        return None
    return [Split(axis - (op.attr("axis") % rank < axis))] * len(op.outputs)


@rule("ConcatV2")
def concat(op: Operation) -> list[Any] | None:
    *parts, _ = op.labels
    at = static_axis(op.value(len(parts)), op.rank())
    return [parts[0]] if len({*parts}) == 1 and at not in (None, parts[0].axis) else None


@rule("Split SplitV")
def split(op: Operation) -> list[Any] | None:
    data, at = (1, 0) if op.kind == "Split" else (0, 2)
    label, axis = op.labels[data], static_axis(op.value(at), op.rank(data))
    if not isinstance(label, Split) or axis in (None, label.axis):
        return None
    return [label] * len(op.outputs)


@rule("Pad PadV2 MirrorPad MirrorPadGrad")
def pad(op: Operation) -> list[Any] | None:
    label, paddings = op.labels[0], op.value(1)
    if not isinstance(label, Split):
        return None
    if paddings is None:
        return [label] if _has_all(op, label.axis) else None
    return None if any(paddings[label.axis]) else [label]


def _has_all(op: Operation, axis: int) -> bool:
    """Return whether an axis is as long in the output: it has all that the input has, in order.

    Nothing is padded or cut off that has no entries.
    """
    if op.rank() is None or op.outputs[0].shape.rank is None:
        return False
    return op.shape()[axis] is not None and op.outputs[0].shape[axis] == op.shape()[axis]


@rule("Slice")
def cut_out(op: Operation) -> list[Any] | None:
    label, begin = op.labels[0], op.inputs[1].op
    if not isinstance(label, Split) or (op.graph.is_body and op.labels[2] is SIZE):
        return None  # along which axis?
    if begin.type == "ConcatOffset" and op.labels[2] == ShapeOf(label.axis):
        # The gradient of a concatenation begins at zero, but along the axis that was joined.
        at = begin.inputs[0]
        value = tf.get_static_value(at.op.inputs[0] if at.op.type == "FloorMod" else at)
        joined = static_axis(value, op.rank())
        return None if joined in (None, label.axis) else [label]
    return [label] if _has_all(op, label.axis) else None


@rule("BroadcastTo")
def broadcast(op: Operation) -> list[Any] | None:
    to, label = op.axis_of_output(), op.labels[0]
    before, after = op.rank(), op.outputs[0].shape.rank
    if to is None or before is None or after is None:
        return None
    position = before - (after - to)  # of the output's axis of examples, in the input
    if isinstance(label, Split):
        return [Split(to)] if label.axis == position else None
    has_examples = position >= 0 and op.shape()[position] != 1
    return None if has_examples or op.graph.is_body else [Split(to)]


@rule("Tile")
def tile(op: Operation) -> list[Any] | None:
    """Repeat each example, or what has none for all examples, as gradients of sums do."""
    label, times = op.labels[0], tf.get_static_value(op.inputs[1], partial=True)
    to = op.axis_of_output()
    if op.rank() is None or (op.graph.is_body and is_size(op.labels[1])):
        return None
    if isinstance(label, Split):
        return [label] if times is not None and times[label.axis] == 1 else None
    if to is None or op.graph.is_body:
        return None
    return [Split(to)] if label is SAME and op.shape()[to] == 1 else None


@rule("Fill")
def fill(op: Operation) -> list[Any] | None:
    to = op.axis_of_output()
    if op.labels[1] is not SAME:
        return None
    axis = _counted_axis(op)
    if axis is not None:
        return [Split(axis)]
    return None if to is None or op.graph.is_body else [Split(to)]


def _counted_axis(op: Operation) -> int | None:
    """Return which length of a shape is that of what is split."""
    shape, label = op.inputs[0].op, op.labels[0]
    if isinstance(label, ShapeOf):
        return label.axis
    counting = [i for i, x in enumerate(shape.inputs) if is_size(op.graph.of(x))]
    if shape.type != "Pack" or len(counting) != 1:
        return None
    length = shape.inputs[counting[0]].op
    if length.type != "StridedSlice" or length.get_attr("shrink_axis_mask") != 1:
        return None
    source, at = op.graph.of(length.inputs[0]), tf.get_static_value(length.inputs[1])
    is_length = isinstance(source, ShapeOf) and at is not None and [*at] == [source.axis]
    return counting[0] if is_length else None


@rule("StatelessRandomUniformV2 StatelessRandomNormalV2")
def random_numbers(op: Operation) -> list[Any] | None:
    """Draw the numbers of a device's examples, by their position in the batch."""
    of = op.labels[0]
    to = of.axis if isinstance(of, ShapeOf) else op.axis_of_output()
    # What TensorFlow selects is Philox, too, on CPUs and GPUs.
    is_philox = op.inputs[3].op.type == "StatelessRandomGetAlg" or op.value(3) in (1, 3)
    return [Split(0)] if to == 0 and is_philox and not op.graph.is_body else None


@rule("StridedSlice")
def strided_slice(op: Operation) -> list[Any] | None:
    label = op.labels[0]
    if not isinstance(label, Split):
        return None
    found = _sliced_axes(op, label.axis, is_forward=True)
    return None if found is None else [Split(found)]


@rule("StridedSliceGrad")
def strided_slice_gradient(op: Operation) -> list[Any] | None:
    label = op.labels[4]
    if not isinstance(label, Split):
        return None
    found = _sliced_axes(op, label.axis, is_forward=False)
    return None if found is None else [Split(found)]


def _sliced_axes(op: Operation, axis: int, *, is_forward: bool) -> int | None:
    """Return where an axis is after a slice that takes all of it in its order, or was before."""
    masks = {
        name: op.attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    strides, rank = op.value(3), op.rank() if is_forward else op.outputs[0].shape.rank
    if strides is None or rank is None:
        return None
    num_given = sum(
        not (masks["new_axis"] | masks["ellipsis"]) >> i & 1 for i in range(len(strides))
    )
    inner = outer = 0  # the axis before the slice, and after it
    for i, stride in enumerate(strides):
        has = {name: bool(mask >> i & 1) for name, mask in masks.items()}
        here, there = (inner, outer) if is_forward else (outer, inner)
        length = rank - num_given if has["ellipsis"] else 1
        is_inside = here <= axis < here + length
        if has["ellipsis"]:
            if is_inside:
                return there + axis - here
            inner, outer = inner + length, outer + length
        elif has["new_axis"]:
            if not is_forward and is_inside:
                return None
            outer += 1
        elif has["shrink_axis"]:
            if is_forward and is_inside:
                return None
            inner += 1
        elif is_inside:
            is_all = has["begin"] and has["end"]
            is_long = is_forward and op.outputs[0].shape.rank is not None
            is_long = is_long and op.outputs[0].shape[there] == op.shape()[here] is not None
            return there if stride == 1 and (is_all or is_long) else None
        else:
            inner, outer = inner + 1, outer + 1
    return outer + axis - inner if is_forward else inner + axis - outer


# Lists of tensors, which loops fill and read.


@rule(
    "EmptyTensorList TensorListReserve TensorListFromTensor TensorListSetItem TensorListPushBack "
    "TensorListGetItem TensorListPopBack TensorListStack TensorListElementShape TensorListLength"
)
def lists(op: Operation) -> list[Any] | None:
    is_reserved = op.kind in ("EmptyTensorList", "TensorListReserve")  # for which entries?
    if not op.graph.bodies or (is_reserved and is_size(op.labels[0]) and not op.graph.is_body):
        return None
    of_kind = _LIST_RULES.get(op.kind)
    found = of_kind(op.labels) if of_kind else None
    if op.graph.is_body or not found:
        return found
    if isinstance(found[0], ShapeOf):  # which only a list of parts has
        return None
    # Outside of loops nothing more is written to a list that is new.
    is_entry = op.outputs[-1].dtype != tf.variant and found[-1] is NEW_LIST
    return [*found[:-1], SAME] if is_entry else found


def _entry(labels: Any) -> Any:
    """Return the label of a list's entries; that of a new list is not known yet."""
    return labels[0].label if isinstance(labels[0], ListOf) else NEW_LIST


def _from_tensor(labels: Any) -> list[Any] | None:
    if isinstance(labels[0], Split):
        return [ListOf(Split(labels[0].axis - 1))] if labels[0].axis else None
    return [ListOf(SAME)] if labels[0] is SAME else None


def _with_item(labels: Any) -> list[Any] | None:
    item = labels[-1]
    if not is_list(labels[0]) or not (item is SAME or isinstance(item, Split | ShapeOf)):
        return None
    return [ListOf(item)] if _entry(labels) in (NEW_LIST, item) else None


def _stacked(labels: Any) -> list[Any] | None:
    item = _entry(labels)
    if isinstance(item, ShapeOf):
        return None
    return [Split(item.axis + 1) if isinstance(item, Split) else item]


def _element_shape(labels: Any) -> list[Any] | None:
    item = _entry(labels)
    if item is NEW_LIST:
        return None
    return [ShapeOf(item.axis) if isinstance(item, Split) else SAME]


_LIST_RULES: dict[str, Callable[[Any], list[Any] | None]] = {
    "EmptyTensorList": lambda _: [NEW_LIST],
    "TensorListReserve": lambda _: [NEW_LIST],
    "TensorListFromTensor": _from_tensor,
    "TensorListSetItem": _with_item,
    "TensorListPushBack": _with_item,
    "TensorListGetItem": lambda labels: [_entry(labels)],
    "TensorListPopBack": lambda labels: [labels[0], _entry(labels)],
    "TensorListStack": _stacked,
    "TensorListElementShape": _element_shape,
    "TensorListLength": lambda _: [SAME],
}


@rule(" ".join(WITH_BODIES))
def with_bodies(op: Operation) -> list[Any] | None:
    return op.graph.bodies.labels_of(op) if op.graph.bodies else None
