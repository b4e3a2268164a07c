"""Layouts of tensor parallelism: the axis along which devices share a variable, by its shape.

As in Megatron (Shoeybi et al. 2019): every block of a transformer has a residual stream, whose
width is an axis of each of its weights. The devices share the first other axis: the vocabulary of
an embedding, the heads of attention, the inner axis of a feed-forward network, the experts. So two
weights that are used one after the other need one all-reduce.

On JAX a layout changes what a step costs, not its result. It is chosen when a variable is created,
from its shape, its layer and the variables before. Paths would not do: users choose names, and the
second model of a process has other ones (keras-team/keras-hub#2806).
"""

import difflib
import itertools
import math
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from kdpkit._internal import check_results, checks, versions

SMALL = 4096  # elements; there is no warning if a smaller variable stays complete

_DENSE = keras.layers.Dense | keras.layers.EinsumDense
_POSITIONS = re.compile(r"(Position|Relative)\w*(Embedding|Encoding)")  # Tables are sliced.


class Layouts:
    """Finds the axis along which `num_shards` devices share each variable of a model."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._width: int | None = None  # of the residual stream of the model being built
        self._table_size = 0  # of the embedding before, until the next kernel
        # The shape of each layer's first matrix, and the axis along which it is sharded.
        self._first: Any = weakref.WeakKeyDictionary()
        # For each block the number of kernels whose input is the stream, as those of queries, keys
        # and values, since the last one whose output is the stream.
        self._num_leaving: Any = weakref.WeakKeyDictionary()
        self._has_warned = False

    def axis(self, layer: Any, name: str, shape: Sequence[int], parent: Any = None) -> int | None:
        """Return the axis along which a layer's variable is sharded; None if it is replicated.

        Outside of layers there is none. The parent is the layer that contains it, if it is known.
        """
        shape = tuple(shape)
        is_vector = sum(size > 1 for size in shape) < 2
        if not isinstance(layer, keras.layers.Layer) or is_vector or self._num_shards == 1:
            return None
        axis = self._axis_as_first(layer, shape)
        is_einsum_bias = layer in self._first and isinstance(layer, keras.layers.EinsumDense)
        if axis is None and not is_einsum_bias and not name.startswith("lora_"):
            candidates = self._candidates(layer, name, shape, parent or self)
            divisible = (axis for axis in candidates if shape[axis] % self._num_shards == 0)
            axis = next(divisible, None)
        self._first.setdefault(layer, (shape, axis))
        if axis is None and math.prod(shape) >= SMALL and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`{name}` of the {type(layer).__name__} `{layer.name}`, of shape {shape}, and "
                f"perhaps others, stays complete on all {self._num_shards} devices that share the "
                "model; `kdpkit.sharding.describe(model)` shows all, with their bytes.",
                stacklevel=1,
            )
        return axis

    def _axis_as_first(self, layer: keras.layers.Layer, shape: tuple[int, ...]) -> int | None:
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

    def _candidates(
        self, layer: keras.layers.Layer, name: str, shape: tuple[int, ...], parent: Any
    ) -> Sequence[int]:
        """Return the axes that may be sharded, the best one first."""
        if any(hasattr(each, "state_size") for each in (layer, parent)):
            return ()  # The devices would exchange what a recurrent cell computes at every time.
        if isinstance(layer, keras.layers.Embedding):
            self._width = layer.output_dim
            self._table_size = max(self._table_size, math.prod(shape))
            if layer.input_dim < layer.output_dim:  # An all-reduce would cost more than the lookup.
                return ()
            return (1,) if name.startswith("reverse") else (0,)
        if _POSITIONS.search(type(layer).__name__):
            return ()
        if self._leads_in(layer, shape, parent):
            self._width = shape[1]
            self._num_leaving[parent] = int(shape[0] == shape[1])  # or it may be for queries
            return ()
        num_leaving = self._num_leaving.get(parent, 0)
        # A wide kernel computes queries, keys and values together.
        num_with_this = num_leaving + (3 if math.prod(shape) >= 2 * shape[0] ** 2 else 1)
        if isinstance(layer, keras.layers.EinsumDense):
            contracted, produced = _axes_of_einsum(layer.equation)
            if len(produced) > 1 and len(contracted) == 1:  # from the stream to heads
                self._width = shape[contracted[0]]
                self._num_leaving[parent] = num_with_this
                return produced[:1]  # A single head is never divided.
            if len(contracted) > 1 and len(produced) == 1:  # from heads to the stream
                self._num_leaving[parent] = 0
                return contracted[:1]
        if len(shape) == 2 and shape[0] == shape[1] and self._width in (None, shape[0]):
            # After the kernels of queries, keys and values, a square one leads back to the stream,
            # as the output of attention. One to three more would be other inputs of attention.
            self._width = shape[0]
            leads_back = num_leaving >= 3 and _num_to_come(layer, parent, shape[0]) not in (1, 2, 3)
            self._num_leaving[parent] = 0 if leads_back else num_leaving + 1
            return (0, 1) if leads_back else (1, 0)
        if self._width in (shape[0], shape[-1]):
            self._num_leaving[parent] = num_with_this if shape[0] == self._width else 0
        return self._axes_of_kernel(layer, shape)

    def _leads_in(self, layer: Any, shape: tuple[int, ...], parent: Any) -> bool:
        """Return whether a kernel leads from an embedding to a stream of another width.

        It is outside of blocks, the first one after the table, and smaller. One that is three times
        as wide may be for queries, keys and values.
        """
        table_size, self._table_size = self._table_size, 0
        is_outside = parent is self or isinstance(parent, keras.Model)
        is_first = isinstance(layer, keras.layers.Dense) and math.prod(shape) < table_size
        return is_outside and is_first and shape[0] == self._width and shape[1] != 3 * shape[0]

    def _axes_of_kernel(self, layer: Any, shape: tuple[int, ...]) -> Sequence[int]:
        """Return the axes of a dense or convolutional kernel, or of a weight of any other layer."""
        kernel_size = getattr(layer, "kernel_size", None)
        if not isinstance(kernel_size, tuple) or len(shape) != len(kernel_size) + 2:
            kernel_size = ()  # This is not a convolution.
        axes = range(len(kernel_size), len(shape))
        strides = getattr(layer, "strides", None)
        is_patches = max(kernel_size, default=1) > 1 and kernel_size == strides
        is_kernel = bool(kernel_size) or isinstance(layer, _DENSE)
        if is_patches or (self._width is None and is_kernel):
            self._width = shape[-1]
        width_axes = [axis for axis in axes if shape[axis] == self._width]
        others = [axis for axis in axes if shape[axis] != self._width]
        if len(kernel_size) == 1 and not others:
            return axes  # A convolution over time leads back to the stream.
        is_small = self._width is not None and math.prod(shape) < self._width**2
        if is_small and not is_kernel and self._width not in shape[:-1]:
            return ()  # Biases of heads, learned tokens: all of them are used at once.
        if not width_axes or not others:
            return [*reversed(axes)]
        return others if is_patches else others + width_axes


def _num_to_come(layer: keras.layers.Layer, parent: Any, width: int) -> int:
    """Return how many layers, in a row, lead to the stream and have no kernel yet in a block."""
    to_come = (
        other
        for other in getattr(parent, "_layers", ())
        if isinstance(other, keras.layers.Dense)
        and other is not layer
        and getattr(getattr(other, "kernel", None), "_value", None) is None
    )
    return sum(1 for _ in itertools.takewhile(lambda other: other.units == width, to_come))


def _axes_of_einsum(equation: str) -> tuple[list[int], list[int]]:
    """Return the axes of a kernel that are summed over, and those that are new in the output."""
    left, _, output = equation.replace("...", "").partition("->")
    inputs, _, kernel = left.partition(",")
    contracted = [i for i, axis in enumerate(kernel) if axis in inputs and axis not in output]
    produced = [i for i, axis in enumerate(kernel) if axis in output and axis not in inputs]
    return contracted, produced


def layers_of(variable: keras.Variable) -> tuple[Any, Any]:
    """Return the layer that creates a variable now, and its parent; None outside of layers.

    A variable that is created while shapes are computed gets its value later, when an outer layer
    is built; by then its own layer has it.
    """
    parent, layer = [None, None, *versions.being_built()][-2:]
    for outer in layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else ():
        for inner in outer._layers:
            if any(variable is each for each in getattr(inner, "_trainable_variables", ())):
                return inner, outer
    return layer, parent


def is_for_weight(variable: keras.Variable, weight: keras.Variable) -> bool:
    """Return whether a variable of an optimizer belongs to a weight, and has its shape."""
    has_name = variable.name.startswith(f"{weight.path.replace('/', '_')}_")
    return has_name and tuple(variable.shape) == tuple(weight.shape)


def require_matches(model: keras.Model, layout_map: keras.distribution.LayoutMap) -> None:
    """Raise if a pattern matches no variable and no layer's output of a model."""
    if not model.built:  # It has no variables yet.
        return
    paths = [variable.path for variable in model.variables]
    outputs = [f"{layer.path}/output" for layer in model._flatten_layers()]
    for pattern in layout_map:
        if not any(pattern == path or re.fullmatch(pattern, path) for path in paths + outputs):
            checks.fail(
                "A pattern of `layout_map` matches no variable of the model.",
                pattern=pattern,
                remedy="It must match a complete path. The nearest are "
                f"{checks.listed(difflib.get_close_matches(pattern, paths, 3, 0) or paths[:3])}.",
            )


def describe(model: keras.Model) -> str:
    """Describe how the variables of a model, and of its optimizer, are on the devices, as a table.

    Each row has all variables of the same layer type, name, shape and layout.

    >>> from kdpkit.sharding import ModelParallel
    >>> with ModelParallel(4, model=2).scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
    >>> print(describe(model))
    variables     count      shape        layout   MiB  on a device
    Dense kernel      1  (64, 128)  ('model', -)  0.03         0.02
    Dense bias        1     (128,)           (-)  0.00         0.00
    all weights       2                           0.03         0.02
    """
    rows: dict[Any, list[Any]] = {}
    for layer in model._flatten_layers():
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            kind = f"{type(layer).__name__} {variable.name}"
            key = kind, tuple(variable.shape), _layout_of(variable)
            rows.setdefault(key, []).append(variable)
    cells = [("variables", "count", "shape", "layout", "MiB", "on a device")]
    for (kind, shape, layout), variables in rows.items():
        cells.append((kind, f"{len(variables)}", f"{shape}", layout, *_mebibytes(variables)))
    weights = [*{id(v): v for variables in rows.values() for v in variables}.values()]
    optimizer = model.optimizer.variables if getattr(model, "optimizer", None) else []
    for kind, variables in (("all weights", weights), ("optimizer", optimizer)):
        if variables:
            cells.append((kind, f"{len(variables)}", "", "", *_mebibytes(variables)))
    return check_results.table(cells)


def _layout_of(variable: keras.Variable) -> str:
    spec = [*getattr(variable._value.sharding, "spec", ())]
    axes = spec + [None] * (len(variable.shape) - len(spec))
    return f"({', '.join('-' if axis is None else repr(axis) for axis in axes)})"


def _mebibytes(variables: Sequence[keras.Variable]) -> tuple[str, str]:
    """Return the size of variables, and of their parts on one device."""
    values = [variable._value for variable in variables]
    shards = [math.prod(value.sharding.shard_shape(value.shape)) for value in values]
    on_device = sum(size * v.dtype.itemsize for size, v in zip(shards, values, strict=True))
    return f"{sum(v.nbytes for v in values) / 2**20:.2f}", f"{on_device / 2**20:.2f}"
