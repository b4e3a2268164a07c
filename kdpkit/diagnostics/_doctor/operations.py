"""The operations with which a model computes its losses, as the backend traces them."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from kdpkit._internal import versions
from kdpkit.training._without_logits import in_step

_OF_NO_LAYER = re.compile(r"/?(?:[^/]*->|vmap|einsum|Tensordot|MatMul)")
_DIGITS = "0123456789"  # for the axes of an ellipsis
_FUSED = ("dot_product_attention", "splash", "flash")  # in the names of JAX's kernels


class Operation(NamedTuple):
    """One operation of the forward pass."""

    # A "product" of matrices, "softmax", "random" numbers, "fused" attention, or a "function",
    # whose operations are not known.
    kind: str
    place: str  # its name, after those of the layers in which it is
    shape: tuple[int, ...]  # of its result, or what a softmax takes, without axes of size 1
    dtype: str  # of its first input
    inner: int = 0  # of a product, how many numbers are summed for each of the result
    is_batched: bool = False  # of a product, whether each example has both matrices for itself
    times: int = 1  # that it is computed

    @property
    def layers(self) -> str:
        """The last two of the layers in which it is, such as `"block_0/attention"`."""
        return "/".join(_OF_NO_LAYER.split(self.place)[0].split("/")[-2:])


def traced(model: Any, batch: Any) -> list[Operation]:
    """Trace the losses of a batch in training, and compute nothing; the model must be built."""
    batch = as_fit_passes_it(model, batch)
    with versions.unbuilt_losses(model), in_step(model, updates=False):
        return [*(_of_jax if keras.backend.backend() == "jax" else _of_tensorflow)(model, batch)]


def _of_jax(model: Any, batch: Any) -> Iterator[Operation]:
    import jax

    batch = jax.tree.map(
        lambda part: part if isinstance(part, jax.ShapeDtypeStruct) else np.asarray(part), batch
    )
    variables = model.variables

    def losses(values: list[jax.Array], batch: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
            return _losses(model, batch)

    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in variables]
    return of_jaxpr(jax.make_jaxpr(losses)(shapes, batch).jaxpr)


def _of_tensorflow(model: Any, batch: Any) -> Iterator[Operation]:
    import tensorflow as tf

    specs = keras.tree.map_structure(
        lambda part: part if part is None else tf.type_spec_from_value(part), batch
    )
    function = tf.function(lambda batch: _losses(model, batch), autograph=False)
    return _of_graph(function.get_concrete_function(specs).graph)


def as_fit_passes_it(model: Any, batch: Any) -> Any:
    """Prepare a batch as `fit` of KerasHub's models does, and cast arrays as Keras' does."""
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    names = getattr(model, "input", None)  # a subclass has none
    is_prepared = isinstance(names, dict) and isinstance(parts[0], dict) and {*names} <= {*parts[0]}
    if hasattr(model, "preprocess_samples") and not is_prepared:
        batch = model.preprocess_samples(*parts)

    def cast(part: Any) -> Any:
        is_wide = isinstance(part, np.ndarray) and part.dtype == "float64"
        return part.astype(keras.config.floatx()) if is_wide else part

    return keras.tree.map_structure(cast, batch)


def _losses(model: Any, batch: Any) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return model.compute_loss(x, y, model(x, training=True), sample_weight, training=True)


def of_jaxpr(jaxpr: Any, times: int = 1) -> Iterator[Operation]:
    """Yield the operations of a program of JAX, with those of the programs in it."""
    import jax

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        place = str(equation.source_info.name_stack)
        shapes = [tuple(part.aval.shape) for part in equation.invars]
        shape, dtype = _squeezed(equation.outvars[0].aval.shape), ""
        if shapes and hasattr(equation.invars[0].aval, "dtype"):
            dtype = equation.invars[0].aval.dtype.name
        if any(word in f"{name} {params.get('name', '')}" for word in _FUSED):
            yield Operation("fused", place, shape, dtype, times=times)
            continue
        if name == "dot_general":
            ((axes, _), (shared, _)) = params["dimension_numbers"]
            inner = math.prod(shapes[0][axis] for axis in axes)
            yield Operation("product", place, shape, dtype, inner, bool(shared), times)
        elif name == "conv_general_dilated":
            inner = math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]]
            yield Operation("product", place, shape, dtype, inner, times=times)
        elif name == "random_bits":
            yield Operation("random", place, shape, dtype, times=times)
        elif name == "reduce_max" and params["axes"] == (len(shapes[0]) - 1,):
            yield Operation("softmax", place, _squeezed(shapes[0]), dtype, times=times)
        for part in jax.tree.leaves(params, is_leaf=_is_program):
            if _is_program(part):
                yield from of_jaxpr(part, times * params.get("length", 1))


def _is_program(part: Any) -> bool:
    return hasattr(part, "eqns")


def _of_graph(graph: Any) -> Iterator[Operation]:
    """Yield the operations of a graph of TensorFlow, whose shapes are all known."""
    for operation in graph.get_operations():
        kind, place = operation.type, operation.name
        inputs, outputs = operation.inputs, operation.outputs
        if kind.endswith(("While", "If", "PartitionedCall")):
            yield Operation("function", place, (), "")
        is_known = all(part.shape.is_fully_defined() for part in (*inputs, *outputs[:1]))
        if not (inputs and outputs and is_known):
            continue
        shapes = [tuple(part.shape) for part in inputs]
        shape, dtype = _squeezed(outputs[0].shape), inputs[0].dtype.name
        if kind in ("MatMul", "BatchMatMulV2"):
            is_turned = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
            inner, is_batched = shapes[0][-2 if is_turned else -1], min(map(len, shapes)) > 2
            yield Operation("product", place, shape, dtype, inner, is_batched)
        elif kind == "Einsum" and len(shapes) == 2:
            terms, result = operation.get_attr("equation").decode().split("->")
            left, right = terms.split(",")
            rest = _DIGITS[: len(shapes[0]) - len(left.replace("...", ""))]
            sizes = zip(left.replace("...", rest), shapes[0], strict=True)
            inner = math.prod(size for letter, size in sizes if letter not in result + _DIGITS)
            is_batched = bool({*left} & {*right} & {*result})
            yield Operation("product", place, shape, dtype, inner, is_batched)
        elif kind in ("Conv2D", "Conv3D"):
            yield Operation("product", place, shape, dtype, math.prod(shapes[1][:-1]))
        elif "Softmax" in kind:
            yield Operation("softmax", place, _squeezed(shapes[0]), dtype)
        elif "RandomUniform" in kind:
            yield Operation("random", place, shape, dtype)


def _squeezed(shape: Any) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
