"""What the compiled training step means to a TPU, on either backend.

The step is the one that training would run: forward pass, loss, gradients, the optimizer's update
and the metrics. It is traced and compiled here, and never run, so that nothing is trained.
"""

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kdpkit import _checks, _versions
from kdpkit._findings import Finding

_MODULES = {
    "tensorflow": "kdpkit.diagnostics._tpu_step_tensorflow",
    "jax": "kdpkit.diagnostics._tpu_step_jax",
}
_LONGEST_REASON = 300


def findings(trainer: Any, dataset: Any, first: Any) -> Iterator[Finding]:
    """Check the step that trains on batches like `first`.

    Args:
        trainer: A compiled Keras model, or a `TrainingLoop`.
        dataset: What it trains on.
        first: A batch.
    """
    module = importlib.import_module(_MODULES[keras.backend.backend()])
    model = model_of(trainer)
    if model.run_eagerly:
        yield Finding(
            "eager-step",
            "slow",
            f"model {model.name}",
            "It runs eagerly: each operation is sent to the TPU alone, where it waits for the next "
            "one most of the time.",
            "Compile it with `run_eagerly=False`.",
        )
    try:
        with _whole_tracebacks():
            yield from module.findings(trainer, dataset, first)
    except _checks.InputError:
        raise
    except Exception as error:  # tracing runs the model's code, which may raise anything
        yield _untraceable(error)


def check_model(trainer: Any) -> None:
    """Refuse what has no training step.

    Raises:
        ValueError: It is neither a compiled model nor a `TrainingLoop`.
    """
    is_loop = hasattr(trainer, "per_example_loss")
    if not is_loop and not isinstance(trainer, keras.Model):
        _checks.refuse(
            "`model` must be a Keras model or a `kdpkit.training.TrainingLoop`.",
            model=type(trainer).__name__,
        )
    if not is_loop and not trainer.compiled:
        _checks.refuse(
            "`model` is not compiled, so it has no training step.",
            model=trainer.name,
            remedy="Call `model.compile(optimizer, loss)` first.",
        )


def model_of(trainer: Any) -> Any:
    """Give the model that is trained."""
    return trainer if isinstance(trainer, keras.Model) else trainer.model


def is_loop(trainer: Any) -> bool:
    """Tell whether it is a `TrainingLoop`."""
    return not isinstance(trainer, keras.Model)


def build(model: Any, first: Any) -> None:
    """Build model, optimizer and metrics as `fit` does before its first epoch, and train nothing.

    It is Keras' `fit` that is called, on TensorFlow that of `replica_exact` if there is one: a
    subclass may read its data in another way in its own, before it calls Keras', as KerasHub's
    does, and on JAX `replica_exact` calls that one.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(first)
    with history_kept(model):
        _versions.build_without_training(fit_of(model), model, x, y, sample_weight)


def fit_of(model: Any) -> Callable:
    """Give the `fit` that trains on batches as they are."""
    is_exact = "fit" in vars(model) and keras.backend.backend() == "tensorflow"
    return model.fit if is_exact else functools.partial(keras.Model.fit, model)


@contextlib.contextmanager
def history_kept(model: Any) -> Iterator[None]:
    """Leave `model.history` of an earlier `fit` as it is."""
    before = vars(model).get("history")
    try:
        yield
    finally:
        if before is not None:
            model.history = before
        elif "history" in vars(model):
            del model.history


def layer_at(model: Any, scope: str) -> str | None:
    """Name the layer in the scope of an operation's name.

    Keras enters a scope for each layer, TensorFlow numbers those that come again (`dense_1`), and
    JAX writes transformations around them (`transpose(jvp(dense))`).
    """
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    for part in reversed(re.split(r"[/()]+", scope)):
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in names:
                return f"layer {name}"
    return None


def where_of(model: Any, scope: str) -> str:
    """Say where in the step an operation stands."""
    return layer_at(model, scope) or ", ".join(filter(None, ("train step", scope.strip("/"))))


def reason_of(error: BaseException) -> str:
    """Give the first line that an error says, and no more of it than a sentence can hold."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = re.sub(r"\x1b\[\d*m", "", lines[0]) if lines else ""
    said = said if len(said) <= _LONGEST_REASON else said[:_LONGEST_REASON] + "..."
    return f"{type(error).__name__}: {said}".rstrip(": ")


def layer_raising(errors: Iterable[BaseException]) -> str | None:
    """Name the innermost layer in whose code an error was raised."""
    found = None
    for error in errors:
        traceback = error.__traceback__
        while traceback is not None:
            owner: Any = traceback.tb_frame.f_locals.get("self")
            if isinstance(owner, keras.Layer) and not isinstance(owner, keras.Model):
                found = f"layer {owner.name}"
            traceback = traceback.tb_next
    return found


def causes(error: BaseException | None) -> list[BaseException]:
    """Give an error and those that it came of."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _untraceable(error: Exception) -> Finding:
    chain = causes(error)
    return Finding(
        "untraceable-step",
        "refused",
        layer_raising(chain[:1]) or "train step",
        f"The step cannot be traced, so XLA has nothing to compile: {reason_of(error)}",
        "Train a step on this machine first (`fit` with `steps_per_epoch=1`), and mend what it "
        "says.",
    )


@contextlib.contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Let errors come as they were raised, in which the layer can be found."""
    was_enabled = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was_enabled:
            keras.config.enable_traceback_filtering()
