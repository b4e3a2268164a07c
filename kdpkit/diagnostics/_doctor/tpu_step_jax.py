"""What the compiled training step means to a TPU: its program on JAX, and its lowering for a TPU.

The step is the one that training would run: forward pass, loss, gradients, the optimizer's update
and the metrics. It is traced and lowered here, which needs no TPU, and never run.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax import export

from kdpkit import errors
from kdpkit._internal.check_results import Finding
from kdpkit.diagnostics import _text
from kdpkit.diagnostics._doctor import batches, training_step
from kdpkit.diagnostics._doctor.training_step import Trainable

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "callback")


def findings(trainer: Trainable, first: Any) -> Iterator[Finding]:
    """Check the program of the step that trains on batches like `first`, and lower it for a TPU."""
    first = batches.as_arrays(first)
    batch = jax.tree.map(_spec, first)
    try:
        step, state = _step_of(trainer, first)
        traced = jax.jit(step).trace(state, batch)
    except errors.InputError:
        raise
    except Exception as error:  # tracing runs the model's code, which may raise anything
        yield Finding(
            "untraceable-step",
            "error",
            "train step",
            f"The step cannot be traced, so XLA has nothing to compile: {_text.reason_of(error)}",
            "If a shape or an `if` depends on values, keep the shape: `keras.ops.where(condition, "
            "x, 0)`, a mask that is multiplied, or `size=` of `jnp.nonzero` and `jnp.unique`. Else "
            "train a step on this machine (`fit` with `steps_per_epoch=1`), and fix the error.",
        )
        return
    model = training_step.model_of(trainer)
    calls = [(scope, name) for scope, name in _operations(traced.jaxpr) if name in _CALLBACKS]
    for scope, name in calls:
        yield Finding(
            "python-op",
            "slow",
            _where(model, scope),
            f"The step calls Python on the host (`{name}`), for which the TPU waits in every step. "
            "The rest of the step was not checked.",
            "Write it in `keras.ops` or `jax.numpy`, and do printing in a callback.",
        )
    if calls:  # these cannot be lowered without the TPU's own runtime
        return
    try:
        export.export(jax.jit(step), platforms=["tpu"])(state, batch)
    except Exception as error:  # the rules of each primitive raise any error
        yield Finding(
            "xla",
            "error",
            "train step",
            f"The step cannot be lowered for a TPU: {_text.reason_of(error)}",
            "Write it in other operations of `keras.ops`, or do it in the input pipeline or in a "
            "callback.",
        )


def _spec(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _step_of(trainer: Trainable, first: Any) -> tuple[Callable, Any]:
    """Return the function of a step, and the shapes and types of the variables that it takes."""
    training_step.build(trainer, first)
    if training_step.is_loop(trainer):
        steps: Any = trainer._steps
        return steps._train_step, jax.tree.map(_spec, steps._variables.read())
    model = training_step.model_of(trainer)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return model.train_step, jax.tree.map(lambda variable: _spec(variable.value), variables)


def _operations(jaxpr: Any, scope: str = "") -> Iterator[tuple[str, str]]:
    """Yield all operations with their scopes, those of inner functions too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = f"{scope}/{equation.source_info.name_stack}"
        yield inner, equation.primitive.name
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _operations(value, inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _where(model: keras.Model, scope: str) -> str:
    """Return the layer of a scope, around which JAX writes transformations: `jvp(dense)`."""
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    layers = [part for part in re.split(r"[/()]+", scope) if part in names]
    return f"layer {layers[-1]}" if layers else "train step"
