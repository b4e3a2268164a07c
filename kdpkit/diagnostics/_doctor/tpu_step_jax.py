"""What the compiled training step means to a TPU: its program on JAX, and its lowering for a TPU.

The step is the one that training would run: forward pass, loss, gradients, the optimizer's update
and the metrics. It is traced and lowered here, which needs no TPU, and never run.
"""

import contextlib
import re
import traceback
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
_UNKNOWN_PRIMITIVE = re.compile(r"primitive '([\w-]+)'")
_BY_VALUES = ("nonzero", "unique", "size argument", "boolean ind")  # in the messages of JAX

Operations = list[tuple[str, str]]  # the scope of each, and its name


def findings(trainer: Trainable, dataset: Any, first: Any) -> Iterator[Finding]:
    """Check the program of the step that trains on batches like `first`, and lower it for a TPU.

    Args:
        trainer: A compiled Keras model, or a `TrainingLoop`.
        dataset: What it trains on.
        first: A batch.
    """
    model = training_step.model_of(trainer)
    if model.run_eagerly:
        yield Finding(
            "eager-step",
            "slow",
            f"model {model.name}",
            "It runs eagerly: each operation is sent to the TPU alone, where it waits for the next "
            "one most of the time.",
            "Compile it with `run_eagerly=False`.",
        )
    first = batches.as_arrays(first)
    batch = jax.tree.map(_spec, first)
    try:
        with _full_tracebacks():
            step, state = _step_of(trainer, dataset, first)
            traced = jax.jit(step).trace(state, batch)
    except errors.InputError:
        raise
    except Exception as error:  # tracing runs the model's code, which may raise anything
        yield _untraceable(error)
        return
    operations = [*_operations(traced.jaxpr.jaxpr)]
    calls = [(scope, name) for scope, name in operations if name in _CALLBACKS]
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
        yield _not_lowered(error, operations, model)


def _spec(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _step_of(trainer: Trainable, dataset: Any, first: Any) -> tuple[Callable, Any]:
    """Return the function of a step, and the shapes and types of the variables that it takes."""
    if training_step.is_loop(trainer):
        steps: Any = trainer._steps
        feed = steps.open(dataset, "dataset", steps=1)  # which may be endless
        steps.build(feed, training=True)
        return steps._train_step, jax.tree.map(_spec, steps._variables.read())
    model = training_step.model_of(trainer)
    training_step.build(model, first)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return model.train_step, jax.tree.map(lambda variable: _spec(variable.value), variables)


def _untraceable(error: Exception) -> Finding:
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        is_jax = isinstance(cause, jax.errors.JAXTypeError | IndexError)
        if is_jax and any(words in text for words in _BY_VALUES):
            return Finding(
                "dynamic-shape",
                "error",
                _layer_raising(cause),
                f"A shape depends on values, which XLA cannot compile: {_text.reason_of(cause)}",
                "Keep the shape: `keras.ops.where(condition, x, 0)`, a mask that is multiplied, "
                "or `size=` of `jnp.nonzero` and `jnp.unique`.",
            )
        cause = cause.__cause__ or cause.__context__
    return Finding(
        "untraceable-step",
        "error",
        _layer_raising(error),
        f"The step cannot be traced, so XLA has nothing to compile: {_text.reason_of(error)}",
        "Train a step on this machine first (`fit` with `steps_per_epoch=1`), and fix the error.",
    )


def _not_lowered(error: Exception, operations: Operations, model: keras.Model) -> Finding:
    named = _UNKNOWN_PRIMITIVE.search(str(error))
    scopes = [scope for scope, name in operations if named and name == named[1]]
    return Finding(
        "xla",
        "error",
        _where(model, scopes[0]) if scopes else "train step",
        f"`{named[1]}` cannot be lowered for a TPU."
        if named
        else f"The step cannot be lowered for a TPU: {_text.reason_of(error)}",
        "Write it in other operations of `keras.ops`, or do it in the input pipeline or in a "
        "callback.",
    )


def _operations(jaxpr: Any, scope: str = "") -> Iterator[tuple[str, str]]:
    """Return all operations, those of inner functions too."""
    for equation in jaxpr.eqns:
        inner = f"{scope}/{equation.source_info.name_stack}"
        yield inner, equation.primitive.name
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _operations(getattr(value, "jaxpr", value), inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _where(model: keras.Model, scope: str) -> str:
    """Return the layer of a scope, around which JAX writes transformations: `jvp(dense)`."""
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    layers = [part for part in re.split(r"[/()]+", scope) if part in names]
    return f"layer {layers[-1]}" if layers else f"train step, {scope.strip('/')}".rstrip(", ")


def _layer_raising(error: BaseException) -> str:
    """Return the innermost layer in whose code an error was raised."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [each for each in owners if isinstance(each, keras.Layer)]
    names = [f"layer {each.name}" for each in layers if not isinstance(each, keras.Model)]
    return names[-1] if names else "train step"


@contextlib.contextmanager
def _full_tracebacks() -> Iterator[None]:
    """Keep the frames of Keras in tracebacks, in which the layer is found."""
    was_enabled = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was_enabled:
            keras.config.enable_traceback_filtering()
