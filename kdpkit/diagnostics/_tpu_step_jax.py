"""The training step on JAX: its program, and its lowering for a TPU, which needs none."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax import export

from kdpkit._findings import Finding
from kdpkit.diagnostics._tpu_step import (
    build,
    causes,
    is_loop,
    layer_raising,
    model_of,
    reason_of,
    where_of,
)

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "callback")
_WIDE = ("int64", "uint64", "float64", "complex128")
_UNKNOWN_PRIMITIVE = re.compile(r"primitive '([\w-]+)'")
_BY_VALUES = ("nonzero", "unique", "size argument", "boolean ind")  # in what JAX says of them


def findings(trainer: Any, dataset: Any, first: Any) -> Iterator[Finding]:
    """Check the program of the step, then lower it for a TPU."""
    model = model_of(trainer)
    first = keras.tree.map_structure(lambda part: part if part is None else np.asarray(part), first)
    batch = jax.tree.map(_spec, first)
    try:
        step, variables = (_of_loop if is_loop(trainer) else _of_model)(trainer, dataset, first)
        state = jax.tree.map(lambda variable: _spec(variable.value), variables)
        traced = jax.jit(step).trace(state, batch)
    except Exception as error:  # tracing runs the model's code, which may raise anything
        found = _by_values(error)
        if found is None:
            raise
        yield found
        return
    equations = [*_equations(traced.jaxpr.jaxpr)]
    calls_host = [*_host_calls(equations, model)]
    yield from calls_host
    yield from _wide(equations, model)
    if not calls_host:  # which cannot be lowered without the TPU's own runtime
        exported = export.export(jax.jit(step), platforms=["tpu"])
        yield from _lowered(lambda: exported(state, batch), equations, model)


def _spec(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _of_model(model: Any, dataset: Any, first: Any) -> tuple[Callable, Any]:
    del dataset
    build(model, first)
    return model.train_step, (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def _of_loop(loop: Any, dataset: Any, first: Any) -> tuple[Callable, Any]:
    del first
    steps = loop._steps
    feed = steps.open(dataset, "dataset", steps=1)  # which may be endless
    steps.build(feed, training=True)
    return steps._train_step, steps._variables


def _by_values(error: Exception) -> Finding | None:
    """Give what stands for an array whose shape depends on values; None for any other error."""
    chain = causes(error)
    for cause in chain:
        said = str(cause).lower()
        is_jax = isinstance(cause, jax.errors.JAXTypeError | IndexError)
        if is_jax and any(words in said for words in _BY_VALUES):
            return Finding(
                "dynamic-shape",
                "refused",
                layer_raising([cause]) or "train step",
                f"A shape depends on values, which XLA cannot compile: {reason_of(cause)}",
                "Keep the shape: `keras.ops.where(condition, x, 0)`, a mask that is multiplied, "
                "or `size=` of `jnp.nonzero` and `jnp.unique`.",
            )
    return None


def _equations(jaxpr: Any, scope: str = "") -> Iterator[tuple[str, Any]]:
    """Give all equations, those of functions in it too, each with the scope that it is in."""
    for equation in jaxpr.eqns:
        inner = f"{scope}/{equation.source_info.name_stack}"
        yield inner, equation
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value), inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _host_calls(equations: list[tuple[str, Any]], model: Any) -> Iterator[Finding]:
    for scope, equation in equations:
        if equation.primitive.name in _CALLBACKS:
            yield Finding(
                "python-op",
                "slow",
                where_of(model, scope),
                f"The step calls Python on the host (`{equation.primitive.name}`), for which the "
                "TPU waits in every step. What else a TPU would say of the step is not known.",
                "Write it in `keras.ops` or `jax.numpy`, and do printing in a callback.",
            )


def _wide(equations: list[tuple[str, Any]], model: Any) -> Iterator[Finding]:
    """Look for 64 bits, which JAX has only where `jax_enable_x64` is set."""
    for scope, equation in equations:
        kinds = {v.aval.dtype.name for v in equation.outvars if getattr(v.aval, "shape", ())}
        for kind in kinds.intersection(_WIDE):
            yield Finding(
                "64-bit",
                "slow",
                where_of(model, scope),
                f"It computes in {kind}. A TPU has 32-bit units, and takes several of their "
                "operations for each.",
                "Leave `jax_enable_x64` off, or cast where it begins.",
            )


def _lowered(
    lower: Callable[[], Any], equations: list[tuple[str, Any]], model: Any
) -> Iterator[Finding]:
    try:
        lower()
    except Exception as error:  # the rules of each primitive raise what they like
        named = _UNKNOWN_PRIMITIVE.search(str(error))
        name = named[1] if named else None
        scopes = [scope for scope, equation in equations if equation.primitive.name == name]
        yield Finding(
            "xla",
            "refused",
            where_of(model, scopes[0]) if scopes else "train step",
            f"`{name}` cannot be lowered for a TPU."
            if name
            else f"The step cannot be lowered for a TPU: {reason_of(error)}",
            "Write it in other operations of `keras.ops`, or do it in the input pipeline or in a "
            "callback.",
        )
