"""Where the axis of examples is in the tensors of a step, read from its graph.

A replica may compute on its own what is done to each example by itself, and sums or means over
examples, in which everything else is linear. So every tensor that depends on the examples has one
of these labels, and what no rule below is known for has the last one:

- a dim: the axis of the examples. Entries along it are computed from one example each;
- `MEAN`: a mean over examples, to which only others are added, and which is multiplied only by
  what does not depend on the examples;
- `SUM`: a sum over examples, which is a mean as soon as it is divided by a number of examples;
- `FLAT`: the entries of ragged or sparse examples, any dim of each example;
- `UNFIT`: it depends on how the batch is split, for some examples.

Whether a number of examples has gone into a tensor is followed too (`count_in`): it may be a
divisor (`COUNTED`), or decide about something (`CHOSEN`), which then depends on the split too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MEAN, SUM, FLAT, UNFIT = -1, -2, -3, -4
_OVER_EXAMPLES = (MEAN, SUM)
NOT_COUNTED, COUNTED, CHOSEN = 0, 1, 2

_OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_ELEMENTWISE = frozenset(
    {"Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Angle", "Asin", "Asinh", "Atan", "Atan2"}
    | {"Atanh", "AsString", "BiasAdd", "Bitcast", "BitwiseAnd", "BitwiseOr", "BitwiseXor"}
    | {"BroadcastTo", "Bucketize", "Cast", "Ceil", "CheckNumerics", "ClipByValue", "Complex"}
    | {"ComplexAbs", "Conj", "Cos", "Cosh", "Digamma", "Div", "DivNoNan", "Elu", "EluGrad"}
    | {"Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod"}
    | {"Greater", "GreaterEqual", "Identity", "Imag", "Inv", "InvGrad", "IsFinite", "IsInf"}
    | {"IsNan", "LeakyRelu", "LeakyReluGrad", "LeftShift", "Less", "LessEqual", "Lgamma", "Log"}
    | {"Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "LookupTableFindV2", "Maximum"}
    | {"Minimum", "Mod", "Mul", "MulNoNan", "Ndtri", "Neg", "NextAfter", "NotEqual", "Pow"}
    | {"PlaceholderWithDefault", "PreventGradient", "Real", "RealDiv", "Reciprocal", "Relu"}
    | {"ReciprocalGrad", "Relu6", "Relu6Grad", "ReluGrad", "RightShift", "Rint", "Round", "Rsqrt"}
    | {"RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign"}
    | {"Sin", "Sinh", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt", "SqrtGrad"}
    | {"Square", "SquaredDifference", "StaticRegexReplace", "StopGradient", "StringJoin"}
    | {"StringLower", "StringStrip", "StringToHashBucketFast", "StringToNumber", "StringUpper"}
    | {"Sub", "Tan", "Tanh", "TanhGrad", "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py"}
    | {"Xlogy", "Zeta", "EnsureShape", "IdentityN"}
)
_ADDING = frozenset({"Add", "AddN", "AddV2", "Sub", "Neg", "IdentityN"})
_KEEPING = frozenset({"Identity", "StopGradient", "PreventGradient", "CheckNumerics", "Cast"})
_SHAPING = frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "Transpose", "ConcatV2", "Pack", "Unpack", "Split"}
    | {"SplitV", "StridedSlice", "Slice", "BroadcastTo", "Pad", "Tile", "Fill", "EnsureShape"}
    | {"GatherV2"}
)
_LINEAR = _ADDING | _KEEPING | _SHAPING | {"Sum", "Mean", "UnsortedSegmentSum"}
_MULTIPLYING = frozenset({"Mul", "MatMul", "BatchMatMulV2", "BatchMatMulV3", "MulNoNan", "Einsum"})
_REDUCING = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"})
_DIVIDING = frozenset({"RealDiv", "DivNoNan", "Div"})
_CHOOSING = frozenset(
    {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "Minimum", "Maximum"}
    | {"FloorMod", "Mod", "ClipByValue", "Round", "Ceil", "Floor", "Sign"}
    | {"Sqrt", "Rsqrt", "Square", "Pow", "Log", "Log1p", "Exp", "Expm1", "Tanh", "Sigmoid"}
)
_TINY = 1e-3
_WITHOUT_VALUES = frozenset({"MulNoNan", "Rank", "ZerosLike", "OnesLike", "Range"})
# Of the inputs at other positions only the size counts, or which entries are taken.
_VALUES_AT = {
    **dict.fromkeys((_SHAPING | _REDUCING) - {"ConcatV2", "Pack", "Fill", "Split"}, 0),
    "Fill": 1,
    "Split": 1,
    "UnsortedSegmentSum": 0,
}
# Of the first axis on; the inputs at these positions have the examples.
_OF_IMAGES = {
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"), (0,)),
    **dict.fromkeys(("MaxPool3D", "AvgPool3D", "LRN", "SpaceToDepth", "DepthToSpace"), (0,)),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"), (0,)),
    **dict.fromkeys(("ExtractImagePatches", "AdjustContrastv2", "RGBToHSV", "HSVToRGB"), (0,)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), (2,)),
    **dict.fromkeys(("DepthwiseConv2dNativeBackpropInput",), (2,)),
    **dict.fromkeys(("MaxPoolGrad", "AvgPoolGrad"), (0, 1, 2)),
}
_LAST_AXES = {"Softmax": 1, "LogSoftmax": 1, "TopKV2": 1, "MatrixBandPart": 2, "MatrixDiagV3": 1}
_LAST_AXES |= {
    "InTopKV2": 1,
    "MatrixDiagPartV3": 2,
    "Cholesky": 2,
    "MatrixInverse": 2,
    "FFT": 1,
    "IFFT": 1,
}
_LAST_AXES |= {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}
_SEARCHING = frozenset({"ArgMax", "ArgMin"})
_ALONG = {"Cumsum": 1, "Cumprod": 1, "CumulativeLogsumexp": 1, "ReverseV2": 1, "Roll": 2}


def axis_of(
    output: tf.Tensor, axes: Sequence[int | None], counted: Sequence[int] = ()
) -> int | None:
    """Return the label of what an operation gives, by those of its inputs; None: no examples.

    Args:
        output: What it gives.
        axes: The labels of its inputs.
        counted: How a number of examples has gone into each of them; nothing if it has not.
    """
    label = _label(output, axes)
    if label not in _OVER_EXAMPLES or not any(counted):
        return label
    if not any(axis in _OVER_EXAMPLES for axis in axes):
        return MEAN  # a sum of what was divided
    if output.op.type not in (_MULTIPLYING | _DIVIDING) - {"MulNoNan"}:
        return label
    number = next((i for i, axis in enumerate(axes) if axis is None), None)
    if number is None or not counted[number]:
        return label
    # The other way round a mean becomes a sum, except by a ratio of two numbers of examples.
    is_ratio = output.op.inputs[number].op.type in _DIVIDING
    return MEAN if label == SUM or is_ratio else SUM


def count_in(operation: tf.Operation, axes: Sequence[int | None], counted: Sequence[int]) -> int:
    """Return whether a number of examples goes into the values of what an operation gives, and how.

    Args:
        operation: The operation.
        axes: The labels of its inputs.
        counted: How one has gone into each of them.
    """
    kind = operation.type
    if kind in ("Shape", "ShapeN", "Size"):
        return COUNTED if any(axis is not None for axis in axes) else NOT_COUNTED
    if kind in _WITHOUT_VALUES or "Random" in kind:
        return NOT_COUNTED
    if kind in ("StridedSlice", "GatherV2") and operation.inputs[0].op.type == "Shape":
        return counted[0] if _takes_first(operation) else NOT_COUNTED
    values = [counted[_VALUES_AT[kind]]] if kind in _VALUES_AT else counted
    found = max(values, default=NOT_COUNTED)
    return CHOSEN if found and _decides(operation, counted) else found


def _decides(operation: tf.Operation, counted: Sequence[int]) -> bool:
    """Return whether an operation makes of a number of examples what is no multiple of it."""
    kind = operation.type
    if kind in ("Select", "SelectV2"):
        return bool(counted[0])
    constants = [value for x in operation.inputs if (value := tf.get_static_value(x)) is not None]
    if kind == "Maximum" and any(np.all(value <= 1) for value in constants):
        return False  # there is an example, or nothing to divide
    if kind in ("AddV2", "Add", "Sub"):  # other than what keeps a divisor from being zero
        return any(np.any(np.abs(value) > _TINY) for value in constants)
    return kind in _CHOOSING


def _label(output: tf.Tensor, axes: Sequence[int | None]) -> int | None:
    kind, inputs = output.op.type, output.op.inputs
    present = [axis for axis in axes if axis is not None]
    if UNFIT in present:
        return UNFIT
    if kind in _OF_SHAPES:
        return SUM if FLAT in present else None  # how many entries all examples have
    if not present:
        return None
    if MEAN in present or SUM in present:
        return _axis_of_sum(output, axes)
    if FLAT in present:
        return _axis_of_flat(output, axes)
    if any(x.shape.rank is None for x in (output, *inputs)):
        return UNFIT
    if kind in _ELEMENTWISE:
        return _elementwise(output, axes)
    rule = _RULES.get(kind)
    return UNFIT if rule is None else rule(output, axes)


def is_linear(output: tf.Tensor, axes: Sequence[int | None]) -> bool:
    """Return whether an operation is linear in its inputs of floats that depend on examples."""
    kind = output.op.type
    dependent = [
        x
        for x, axis in zip(output.op.inputs, axes, strict=True)
        if axis is not None and x.dtype.is_floating
    ]
    if kind in _LINEAR:
        return True
    if kind in _DIVIDING:
        return axes[1] is None
    return kind in _MULTIPLYING and len(dependent) < 2


def _axis_of_sum(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    """Sums over examples are added to each other, and multiplied by what has no examples."""
    kind, inputs = output.op.type, output.op.inputs
    summed = [i for i, axis in enumerate(axes) if axis is not None]
    counts = any(inputs[i].dtype.is_integer for i in summed)
    is_rounded = output.dtype.is_integer and any(inputs[i].dtype.is_floating for i in summed)
    if any(axes[i] not in _OVER_EXAMPLES for i in summed) or is_rounded:
        return UNFIT
    label = SUM if SUM in axes else MEAN
    if kind in _ADDING or kind in ("Pack", "ConcatV2"):
        return label
    if kind in _MULTIPLYING or kind in _DIVIDING:
        is_linear = len(summed) == 1 and not counts and (summed == [0] or kind in _MULTIPLYING)
        return label if is_linear else UNFIT
    first = 1 if kind in ("Split", "Fill") else 0
    return label if kind in _LINEAR and summed == [first] else UNFIT


def _axis_of_flat(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    kind = output.op.type
    if kind == "SparseTensorDenseMatMul":
        return 0
    if not all(axis in (None, FLAT) for axis in axes):
        return UNFIT
    if kind == "UnsortedSegmentSum":
        return 0 if output.shape.rank and output.shape[0] is None else SUM
    if kind in _REDUCING and axes[0] == FLAT:
        reduced = _ints(output.op.inputs[1])
        if reduced is not None and all(axis > 0 for axis in reduced):
            return FLAT
        return SUM if kind == "Sum" else UNFIT
    gathers = kind in ("GatherV2", "ResourceGather") and axes[0] is None
    is_by_entry = kind in _ELEMENTWISE or kind in ("StridedSlice", "ExpandDims", "Reshape")
    return FLAT if is_by_entry or gathers else UNFIT


def _elementwise(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    """Return the axis that lies over the examples of all inputs, if there is one."""
    from_the_end = {
        x.shape.rank - axis
        for x, axis in zip(output.op.inputs, axes, strict=True)
        if axis is not None
    }
    if len(from_the_end) > 1:
        return UNFIT
    return int(output.shape.rank - from_the_end.pop())


def _of_images(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    has_examples = [i for i, axis in enumerate(axes) if axis is not None]
    allowed = _OF_IMAGES[output.op.type]
    return 0 if all(axes[i] == 0 and i in allowed for i in has_examples) else UNFIT


def _normalized(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    is_training = output.op.get_attr("is_training")
    return 0 if axes[0] == 0 and not is_training and not any(axes[1:]) else UNFIT


def _in_last_axes(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    given = {axis for axis in axes if axis is not None}
    rank = output.op.inputs[0].shape.rank
    is_apart = all(axis < rank - _LAST_AXES[output.op.type] for axis in given)
    return given.pop() if len(given) == 1 and is_apart else UNFIT


def _reduced(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    kind, (x, along, *_) = output.op.type, output.op.inputs
    if along.op.type == "BroadcastGradientArgs":  # of a gradient, and then given its shape
        return axes[0] if kind == "Sum" and axes[0] is not None else UNFIT
    reduced = _ints(along)
    if axes[0] is None or axes[1] is not None or reduced is None:
        return UNFIT
    dims = {axis % x.shape.rank for axis in reduced}
    if axes[0] in dims:
        return {"Sum": SUM, "Mean": MEAN}.get(kind, UNFIT)
    if kind in _REDUCING and output.op.get_attr("keep_dims"):
        return axes[0]
    return axes[0] - sum(dim < axes[0] for dim in dims)


def _along(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    dims = _ints(output.op.inputs[_ALONG[output.op.type]])
    if axes[0] is None or dims is None:
        return UNFIT
    return UNFIT if axes[0] in {dim % output.shape.rank for dim in dims} else axes[0]


def _reshaped(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    x, shape = output.op.inputs
    axis = axes[0]
    if axis is None:
        return UNFIT
    if shape.op.type == "Shape" and x.op.type == "Sum":  # of a gradient: the shape of its source
        return axis if output.shape.rank > axis and output.shape[axis] is None else SUM
    before, after = x.shape.as_list(), output.shape.as_list()
    if len(after) > axis and after[axis] is None and before[:axis] == after[:axis]:
        dim = axis
    elif after and after[0] is None and None not in before[:axis]:
        dim = 0  # the axes before are now part of it
    else:
        return UNFIT
    if _is_of_tensorflow(shape):
        return dim
    return dim if _divides(after[dim + 1 :], before[axis + 1 :]) else UNFIT


def _is_of_tensorflow(shape: Any) -> bool:
    """Recognize how TensorFlow itself flattens axes: for cross-entropies, and in `tensordot`."""
    if shape.op.type != "Pack":
        is_computed = tf.get_static_value(shape) is None
        return is_computed and shape.op.type in ("ConcatV2", "Shape", "Slice")
    first, *others = shape.op.inputs
    is_of_tensordot = all(x.op.type == "Prod" for x in shape.op.inputs)
    is_last_kept = all(x.op.type in ("StridedSlice", "GatherV2") for x in others)  # its size
    return is_of_tensordot or (is_last_kept and tf.get_static_value(first) == -1)


def _divides(after: list[int | None], before: list[int | None]) -> bool:
    """Return whether entries of several examples cannot come to lie in one."""
    sizes = [math.prod(size for size in sizes if size is not None) for sizes in (after, before)]
    if None in after:
        return after.count(None) <= before.count(None) and sizes[0] == sizes[1]
    return sizes[0] > 0 and sizes[1] % sizes[0] == 0


def _squeezed(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    rank = output.op.inputs[0].shape.rank
    dims = {dim % rank for dim in output.op.get_attr("squeeze_dims")}
    axis = axes[0]
    if axis is None or not dims or axis in dims:
        return UNFIT
    return axis - sum(dim < axis for dim in dims)


def _expanded(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    dims = _ints(output.op.inputs[1])
    if axes[0] is None or dims is None:
        return UNFIT
    return axes[0] + (dims[0] % output.shape.rank <= axes[0])


def _transposed(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    order = _ints(output.op.inputs[1])
    return UNFIT if order is None or axes[0] is None else [*order].index(axes[0])


def _concatenated(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    *parts, _ = axes
    dims = _ints(output.op.inputs[-1])
    given = set(parts) - {None}
    if len(given) != 1 or dims is None:
        return UNFIT
    (axis,) = given
    if dims[0] % output.shape.rank == axis:
        return UNFIT if None in parts else int(axis or 0)  # constants have their own positions
    return int(axis or 0)


def _packed(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    given = set(axes) - {None}
    dim = output.op.get_attr("axis") % output.shape.rank
    if len(given) != 1:
        return UNFIT
    axis = int(given.pop() or 0)
    return axis + (dim <= axis)


def _unpacked(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    (axis,) = axes
    dim = output.op.get_attr("axis") % output.op.inputs[0].shape.rank
    return UNFIT if axis is None or dim == axis else axis - (dim < axis)


def _split(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    x, along = (0, 2) if output.op.type == "SplitV" else (1, 0)
    dims = _ints(output.op.inputs[along])
    axis = axes[x]
    is_kept = axis is not None and dims is not None and dims[0] % output.shape.rank != axis
    return axis if is_kept and axis is not None else UNFIT


def _strided(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    """Follow the axis through `x[...]`: all of it must be taken, in its order."""
    op, wanted = output.op, axes[0]
    if wanted is None:
        return UNFIT
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    strides = _ints(op.inputs[3])
    count = op.inputs[1].shape[0]
    if strides is None or count is None:
        return UNFIT
    has = lambda name, i: bool(masks[name] >> i & 1)  # noqa: E731  # short, and used here alone
    taken = sum(not has("new_axis", i) and not has("ellipsis", i) for i in range(count))
    axis = dim = 0  # in the input, and in the output
    for i in range(count):
        if has("ellipsis", i):
            skipped = op.inputs[0].shape.rank - taken
            if axis <= wanted < axis + skipped:
                return dim + wanted - axis
            axis, dim = axis + skipped, dim + skipped
        elif has("new_axis", i):
            dim += 1
        elif axis == wanted:
            return dim if has("begin", i) and has("end", i) and strides[i] == 1 else UNFIT
        else:
            axis, dim = axis + 1, dim + (not has("shrink_axis", i))
    return dim + wanted - axis


def _sliced(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    begin, size = (tf.get_static_value(x, partial=True) for x in output.op.inputs[1:])
    axis = axes[0]
    if axis is None or begin is None or size is None:
        return UNFIT
    return axis if begin[axis] == 0 and size[axis] == -1 else UNFIT


def _padded(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    around = tf.get_static_value(output.op.inputs[1], partial=True)
    axis = axes[0]
    if axis is None or around is None:
        return UNFIT
    return axis if all(entry == 0 for entry in np.ravel(around[axis])) else UNFIT


def _tiled(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    times = tf.get_static_value(output.op.inputs[1], partial=True)
    axis = axes[0]
    return axis if axis is not None and times is not None and times[axis] == 1 else UNFIT


def _gathered(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    params, indices, *_ = axes
    of_batch = output.op.get_attr("batch_dims")
    if output.op.type == "ResourceGather":
        return UNFIT if indices is None or params is not None else indices
    dims = _ints(output.op.inputs[2])
    if dims is None:
        return UNFIT
    along = dims[0] % output.op.inputs[0].shape.rank
    if params is None:
        return UNFIT if indices is None or of_batch else along + indices
    if indices is None:
        more = output.op.inputs[1].shape.rank - 1
        return UNFIT if params == along or of_batch else params + (more if along < params else 0)
    return params if params == indices < of_batch else UNFIT


def _gathered_points(output: tf.Tensor, axes: Sequence[int | None]) -> int:  # noqa: ARG001  # a rule
    params, indices = axes
    return indices if params is None and indices is not None else UNFIT


def _one_hot(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    axis, dim = axes[0], output.op.get_attr("axis")
    if axis is None or any(other is not None for other in axes[1:]):
        return UNFIT
    return axis + (dim != -1 and dim <= axis)


def _multiplied(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    """Matrices: examples are rows of the left one, or are summed over, or lie in axes before."""
    op, (one, other) = output.op, axes
    flags = ("adj_x", "adj_y") if op.type.startswith("Batch") else ("transpose_a", "transpose_b")
    ranks = [x.shape.rank for x in op.inputs]
    summed = [
        rank - (2 if op.get_attr(flag) == (i == 0) else 1)
        for i, (rank, flag) in enumerate(zip(ranks, flags, strict=True))
    ]
    before = [
        axis - rank if axis is not None and axis < rank - 2 else None
        for axis, rank in zip(axes, ranks, strict=True)
    ]
    if all(axis is None or axis == dim for axis, dim in zip(axes, summed, strict=True)):
        return SUM
    if all(axis is None or dim is not None for axis, dim in zip(axes, before, strict=True)):
        given = {dim for dim in before if dim is not None}
        return output.shape.rank + given.pop() if len(given) == 1 else UNFIT
    if one is not None and other is None and one not in (summed[0], before[0]):
        return int(output.shape.rank - 2)
    if other is not None and one is None and other not in (summed[1], before[1]):
        return int(output.shape.rank - 1)
    return UNFIT


def _summed_by_einsum(output: tf.Tensor, axes: Sequence[int | None]) -> int:
    """Return where the letter of the examples is; SUM if it is summed over."""
    terms, _, result = output.op.get_attr("equation").decode().replace(" ", "").partition("->")
    letters = set()
    for x, axis, term in zip(output.op.inputs, axes, terms.split(","), strict=True):
        if axis is not None:
            letters.add(_letters(term, x.shape.rank)[axis])
    if len(letters) != 1:
        return UNFIT
    (letter,) = letters
    after = _letters(result, output.shape.rank)
    return after.index(letter) if letter in after else SUM


def _letters(term: str, rank: int) -> list[str]:
    """Return a letter for each axis; those of an ellipsis are dims from its end."""
    first, dots, last = term.partition("...")
    if not dots:
        return [*term]
    hidden = rank - len(first) - len(last)
    return [*first, *(str(-i) for i in range(hidden, 0, -1)), *last]


def _takes_first(op: tf.Operation) -> bool:
    """Return whether the first size of a shape, that of the examples, may be taken."""
    entries = _ints(op.inputs[1])
    return entries is None or 0 in entries


def _ints(tensor: tf.Tensor) -> list[int] | None:
    value = tf.get_static_value(tensor)
    return None if value is None else [int(entry) for entry in np.ravel(value)]


_RULES: dict[str, Callable[[Any, Sequence[int | None]], int]] = {
    **dict.fromkeys(_OF_IMAGES, _of_images),
    **dict.fromkeys(_LAST_AXES, _in_last_axes),
    **dict.fromkeys(_REDUCING | _SEARCHING, _reduced),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), _multiplied),
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _padded),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gathered),
    "FusedBatchNormV3": _normalized,
    "Reshape": _reshaped,
    "Squeeze": _squeezed,
    "ExpandDims": _expanded,
    "Transpose": _transposed,
    "ConcatV2": _concatenated,
    "Pack": _packed,
    "Unpack": _unpacked,
    "StridedSlice": _strided,
    "Slice": _sliced,
    "Tile": _tiled,
    "GatherNd": _gathered_points,
    "OneHot": _one_hot,
    "Einsum": _summed_by_einsum,
    "L2Loss": lambda output, axes: SUM,  # noqa: ARG005  # half the sum of squares
    "BiasAddGrad": lambda output, axes: SUM if axes[0] == 0 else UNFIT,  # noqa: ARG005
}
