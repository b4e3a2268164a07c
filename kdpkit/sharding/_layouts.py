"""Layouts of tensor parallelism: the axis along which devices share a variable, by its shape.

As in Megatron (Shoeybi et al. 2019), every block of a transformer has a residual stream, whose
width is an axis of each of its weights. Sharded is the first axis that is not this width: the
vocabulary of an embedding, the heads of attention, the inner axis of a feed-forward network, the
experts. So two weights that are used one after the other need one all-reduce.

On JAX a layout changes what a step costs, not its result. It is found when a variable is made, from
its shape, its layer and the variables before; paths tell nothing, since names are what a user makes
them, and the second model of a process has others (keras-team/keras-hub#2806).
"""

import difflib
import math
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from kdpkit._internal import check_results, checks, versions

SMALL = 4096  # elements; nobody is told of a variable of fewer that stays complete

_DENSE = keras.layers.Dense | keras.layers.EinsumDense
_OF_POSITIONS = re.compile(r"Position\w*(Embedding|Encoding)")  # tables that are sliced


class Layouts:
    """Finds the axis along which devices share each variable of a model.

    Args:
        num_shards: How many devices share a variable.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._width: int | None = None  # of the residual stream of what is being built
        # The shape of each layer's first matrix, and the axis along which it is sharded.
        self._first: Any = weakref.WeakKeyDictionary()
        # How many kernels a layer's layers have that lead away from the stream, as queries, keys
        # and values do, since the last one that leads back.
        self._leading_away: Any = weakref.WeakKeyDictionary()
        self._has_warned = False

    def axis(self, layer: Any, name: str, shape: Sequence[int], parent: Any = None) -> int | None:
        """Return the axis along which a variable is sharded; None if it is replicated.

        Args:
            layer: The layer that makes the variable; None if it is made outside of a layer.
            name: What the layer calls it.
            shape: Its shape.
            parent: The layer that the layer is in, if that is known.
        """
        shape = tuple(shape)
        is_vector = sum(size > 1 for size in shape) < 2
        if not isinstance(layer, keras.layers.Layer) or is_vector or self._num_shards == 1:
            return None
        axis = self._axis_beside_first(layer, shape)
        is_beside = layer in self._first and isinstance(layer, keras.layers.EinsumDense)
        if axis is None and not is_beside and not name.startswith("lora_"):
            axis = self._first_divisible(
                self._candidates(layer, name, shape, parent or layer), shape
            )
        self._first.setdefault(layer, (shape, axis))
        if axis is None:
            self._warn(layer, name, shape)
        return axis

    def _axis_beside_first(self, layer: keras.layers.Layer, shape: tuple[int, ...]) -> int | None:
        """Return the axis that a layer's first matrix is sharded along, if this variable has it.

        A bias of heads, LoRA's matrices and the weights of a recurrent state begin or end with axes
        of their layer's kernel.
        """
        first, axis = self._first.get(layer, ((), None))
        if axis is None:
            return None
        from_end = len(first) - axis
        if first[: axis + 1] == shape[: axis + 1]:
            return axis
        if len(shape) >= from_end and first[axis:] == shape[-from_end:]:
            return len(shape) - from_end
        return None

    def _first_divisible(self, axes: Sequence[int], shape: tuple[int, ...]) -> int | None:
        return next((axis for axis in axes if shape[axis] % self._num_shards == 0), None)

    def _candidates(
        self, layer: keras.layers.Layer, name: str, shape: tuple[int, ...], parent: Any
    ) -> Sequence[int]:
        """Return the axes that may be sharded, the best one first."""
        if isinstance(layer, keras.layers.Embedding):
            return self._axes_of_embedding(layer, name)
        if _OF_POSITIONS.search(type(layer).__name__):
            return ()
        if isinstance(layer, keras.layers.EinsumDense):
            contracted, produced = _axes_of_einsum(layer.equation)
            if len(produced) > 1 and len(contracted) == 1:  # from the stream to heads
                self._width = shape[contracted[0]]
                return produced[:1]  # a head is never cut
            if len(contracted) > 1 and len(produced) == 1:  # and back
                return contracted[:1]
        if len(shape) == 2 and shape[0] == shape[1] and self._width in (None, shape[0]):
            self._width = shape[0]
            return (0, 1) if self._leads_back(parent) else (1, 0)
        if shape[0] == self._width:
            self._lead_away(parent, 3 if shape[-1] >= 2 * shape[0] else 1)  # of three in one
        return self._axes_of_kernel(layer, shape)

    def _leads_back(self, parent: Any) -> bool:
        """Return whether a square kernel leads back to the stream, as attention's output does.

        It does after three that lead away: queries, keys and values.
        """
        if self._leading_away.get(parent, 0) < 3:
            self._lead_away(parent, 1)
            return False
        self._leading_away[parent] = 0
        return True

    def _lead_away(self, parent: Any, count: int) -> None:
        self._leading_away[parent] = self._leading_away.get(parent, 0) + count

    def _axes_of_embedding(self, layer: Any, name: str) -> Sequence[int]:
        """Return the vocabulary's axis; a small one is looked up sooner than it is added up."""
        self._width = layer.output_dim
        if layer.input_dim < layer.output_dim:
            return ()
        return (1,) if name.startswith("reverse") else (0,)

    def _axes_of_kernel(self, layer: Any, shape: tuple[int, ...]) -> Sequence[int]:
        """Return the axes of a dense or convolutional kernel, or of an own layer's weight."""
        kernel_size = getattr(layer, "kernel_size", None)
        if not isinstance(kernel_size, tuple) or len(shape) != len(kernel_size) + 2:
            kernel_size = ()  # of no convolution
        axes = range(len(kernel_size), len(shape))
        is_patches = max(kernel_size, default=1) > 1 and kernel_size == getattr(
            layer, "strides", None
        )
        is_kernel = bool(kernel_size) or isinstance(layer, _DENSE)
        if is_patches or (self._width is None and is_kernel):
            self._width = shape[-1]
        others = [axis for axis in axes if shape[axis] != self._width]
        of_width = [axis for axis in axes if shape[axis] == self._width]
        if not of_width or not others:
            return [*reversed(axes)]
        return others if is_patches else others + of_width

    def _warn(self, layer: keras.layers.Layer, name: str, shape: tuple[int, ...]) -> None:
        if math.prod(shape) >= SMALL and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`{name}` of the {type(layer).__name__} `{layer.name}`, of shape {shape}, and "
                f"perhaps others, stays complete on all {self._num_shards} devices that share the "
                "model; `kdpkit.sharding.describe(model)` shows all, with their bytes.",
                stacklevel=1,
            )


def _axes_of_einsum(equation: str) -> tuple[list[int], list[int]]:
    """Return the axes of a kernel that are summed over, and those that are new in the output."""
    left, _, output = equation.replace("...", "").partition("->")
    inputs, _, kernel = left.partition(",")
    contracted = [at for at, axis in enumerate(kernel) if axis in inputs and axis not in output]
    produced = [at for at, axis in enumerate(kernel) if axis in output and axis not in inputs]
    return contracted, produced


def layers_of(variable: keras.Variable) -> tuple[Any, Any]:
    """Return the layer that makes a variable now, and the one it is in; None outside of layers.

    A variable that is made while shapes are worked out gets its value later, when an outer layer is
    being built; its own layer has it by then.
    """
    being_built = [None, None, *versions.being_built()]
    parent, layer = being_built[-2:]
    outer = layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else ()
    for candidate in outer:
        for inner in candidate._layers:
            if any(variable is own for own in getattr(inner, "_trainable_variables", ())):
                return inner, candidate
    return layer, parent


def is_of_weight(variable: keras.Variable, weight: keras.Variable) -> bool:
    """Return whether an optimizer keeps a variable for a weight, of the weight's shape."""
    is_named_so = variable.name.startswith(f"{weight.path.replace('/', '_')}_")
    return is_named_so and tuple(variable.shape) == tuple(weight.shape)


def require_matches(model: keras.Model, layout_map: keras.distribution.LayoutMap) -> None:
    """Raise if a pattern of the user's matches no variable, and no layer's output, of a model.

    A model that is not built yet has none of its variables.
    """
    if not model.built:
        return
    paths = [variable.path for variable in model.variables]
    outputs = [f"{layer.path}/output" for layer in model._flatten_layers()]
    for pattern in layout_map:
        if not any(pattern == path or re.fullmatch(pattern, path) for path in paths + outputs):
            checks.fail(
                "A layout's pattern matches no variable of the model, so that nothing would be "
                "sharded by it.",
                pattern=pattern,
                remedy="It must match a complete path. The nearest are "
                f"{checks.listed(difflib.get_close_matches(pattern, paths, 3, 0) or paths[:3])}.",
            )


def described(model: keras.Model) -> str:
    """Return a table of a model's variables by kind, as `kdpkit.sharding.describe` shows it."""
    rows: dict[Any, list[Any]] = {}
    for layer in model._flatten_layers():
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            kind = f"{type(layer).__name__} {variable.name}"
            key = kind, tuple(variable.shape), _layout_of(variable)
            rows.setdefault(key, []).append(variable)
    cells = [("variables", "count", "shape", "layout", "MiB", "on a device")]
    for (kind, shape, layout), variables in rows.items():
        cells.append((kind, f"{len(variables)}", f"{shape}", layout, *_mebibytes(variables)))
    weights = [*{id(v): v for of_kind in rows.values() for v in of_kind}.values()]
    of_optimizer = model.optimizer.variables if getattr(model, "optimizer", None) else []
    for kind, variables in (("all weights", weights), ("optimizer", of_optimizer)):
        if variables:
            cells.append((kind, f"{len(variables)}", "", "", *_mebibytes(variables)))
    return check_results.table(cells)


def _layout_of(variable: keras.Variable) -> str:
    spec = [*getattr(variable._value.sharding, "spec", ())]
    axes = spec + [None] * (len(variable.shape) - len(spec))
    return f"({', '.join('-' if axis is None else repr(axis) for axis in axes)})"


def _mebibytes(variables: Sequence[keras.Variable]) -> tuple[str, str]:
    """Return the size of variables, and of what a device has of them."""
    values = [variable._value for variable in variables]
    shards = [math.prod(value.sharding.shard_shape(value.shape)) for value in values]
    on_device = sum(size * v.dtype.itemsize for size, v in zip(shards, values, strict=True))
    return f"{sum(v.nbytes for v in values) / 2**20:.2f}", f"{on_device / 2**20:.2f}"
