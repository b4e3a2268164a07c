"""What Keras and JAX do differently in the versions that kdpkit works with, in one file.

Private parts of Keras that training needs are in `kdpkit.training.tensorflow._keras_internals`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from kdpkit._internal import checks


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


KERAS = _numbers(keras.__version__)


def reject_unknown(name: str, **versions: str) -> NoReturn:
    """Raise for a Keras, or what is below it, with internals that no tested version has."""
    checks.fail(
        f"kdpkit needs `{name}` as Keras 3.13 to 3.16 have it, and this version differs. Install "
        "one of these, or update kdpkit.",
        keras=keras.__version__,
        **versions,
    )


def require_newer(sentence: str, *, least_keras: tuple[int, int] = (0, 0)) -> None:
    """Raise a sentence for a JAX before 0.10, or an older Keras than this."""
    import jax

    if _numbers(jax.__version__) < (0, 10) or least_keras > KERAS:
        checks.fail(sentence, jax=jax.__version__, keras=keras.__version__)


def let_gloo_listen_at(host: str) -> None:
    """Let JAX's collectives on CPUs listen at a host, not at the address of this machine's name.

    Call it before JAX starts its devices. JAX 0.10 has no public setting for it.
    """
    from jax._src.lib import _jax

    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for; none if it was not."""
    variables = getattr(optimizer, "_trainable_variables", None) if optimizer.built else []
    if variables is None:
        reject_unknown("Optimizer._trainable_variables")
    return list(variables)


def being_built() -> list[Any]:
    """Return the layers and optimizers that create variables now, each inside the one before."""
    scopes = global_state.get_global_attribute("name_scope_stack") or []
    if not all(hasattr(scope, "caller") for scope in scopes):
        reject_unknown("name_scope.caller")
    return [scope.caller for scope in scopes]


def build_without_training(fit: Callable, model: keras.Model, x: Any, y: Any, weights: Any) -> None:
    """Build model, optimizer and metrics as `fit` does, and train nothing.

    On JAX, Keras before 3.15 fails in a `fit` of no epoch.
    """
    if keras.backend.backend() == "jax" and KERAS < (3, 15):
        model._symbolic_build(data_batch=(x, y, weights))
        return
    size = len(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
    # Without shuffling, for which random numbers would be drawn.
    fit(x, y, sample_weight=weights, batch_size=size, epochs=0, shuffle=False, verbose=0)
    if not model.built:  # On one device TensorFlow builds it in the first step.
        model._symbolic_build(data_batch=(x, y, weights))


@contextlib.contextmanager
def unbuilt_losses(model: keras.Model) -> Iterator[None]:
    """Leave the losses of a model as they are, which `compute_loss` builds at its first call.

    Keras' `fit` builds a model whose losses are not built, and draws a first order of the examples.
    """
    losses: Any = getattr(model, "_compile_loss", None)
    if losses is None:
        yield
        return
    copied = object.__new__(type(losses))  # its own copy would be one that was saved and loaded
    for name, value in vars(losses).items():
        object.__setattr__(copied, name, [*value] if isinstance(value, list) else value)
    model._compile_loss = copied
    try:
        yield
    finally:
        model._compile_loss = losses


def global_seeds() -> list[keras.Variable]:
    """Return the state of `keras.random` without a seed; none if nothing has drawn there yet.

    Keras keeps it by thread, and forgets it in `keras.utils.set_random_seed`.
    """
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def make_global_seeds(strategy: Any = None) -> None:
    """Create what `global_seeds` returns, if there is none, on all replicas of a strategy."""
    has_replicas = strategy is not None and strategy.num_replicas_in_sync > 1
    with strategy.scope() if has_replicas else contextlib.nullcontext():
        seed_generator.global_seed_generator()
