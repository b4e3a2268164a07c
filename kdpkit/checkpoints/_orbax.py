"""Checkpoints of `keras.callbacks.OrbaxCheckpoint`, loaded into a model on any devices."""

import os
import re
from typing import Any

import keras
import numpy as np

from kdpkit import errors
from kdpkit._internal import checks
from kdpkit.checkpoints._variables import assign, scope_of

# Keras numbers these in each process, whatever model they are of.
_SEED = re.compile(r"non_trainable_variables/seed_generator(?:_(\d+))?/seed_generator_state")
_OPTIMIZER = re.compile(r"(optimizer_variables/\w+?)_\d+/")
_PYTREE = "pytree"  # the name under which Keras saves variables


def load_orbax(model: keras.Model, directory: str | os.PathLike[str]) -> None:
    """Load the weights and the optimizer that `keras.callbacks.OrbaxCheckpoint` saved.

    It may have been saved on other devices, by other processes and on the other backend; each
    device reads its part. `model.load_weights` does so on the devices that saved it, but leaves
    out, without a word, an optimizer that is not built yet and all variables whose names differ
    (keras-team/keras#23251). Metrics are not loaded. With several processes all must call it.

    Args:
        model: A built model with the same names of layers. If it is compiled, its optimizer is
            built and loaded too, unless only weights were saved.
        directory: That of the callback, whose newest step is loaded, or one step in it.

    Raises:
        ValueError: It holds no checkpoint, a damaged one, or one of another model.
        ImportError: Orbax is not installed.

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> load_orbax(model, tempfile.mkdtemp())
    Traceback (most recent call last):
    ...
    kdpkit.errors.InputError: There is no complete Orbax checkpoint of Keras in the directory. ...
    """
    try:
        from etils import epath
        from orbax.checkpoint import v1 as ocp
    except ImportError as error:
        raise errors.PackageInputError(
            f"Orbax cannot be imported ({error}). Run `{checks.install_command('orbax')}`."
        ) from error
    step = epath.Path(os.fspath(directory)).resolve()  # Orbax reads absolute paths only
    steps = [path for path in step.glob("*") if path.name.isdigit()]  # unfinished ones are not
    step = max(steps, key=lambda path: int(path.name), default=step)
    if not (step / _PYTREE).exists():
        checks.fail(
            "There is no complete Orbax checkpoint of Keras in the directory.", directory=str(step)
        )
    try:
        tree = ocp.metadata(step, checkpointable_name=_PYTREE).metadata
        if tree is None:  # of which Orbax only writes to its log
            raise OSError("its metadata are incomplete")
        saved = {"/".join(path): leaf for path, leaf in keras.tree.flatten_with_path(tree)}
        found = _matched(model, saved, str(step))
        abstract = [
            _abstract(leaf, found[name]) if name in found else ocp.PLACEHOLDER
            for name, leaf in saved.items()
        ]
        abstract = keras.tree.pack_sequence_as(tree, abstract)
        loaded = ocp.load(step, abstract, checkpointable_name=_PYTREE)
    except errors.InputError:
        raise
    except Exception as error:  # damaged bytes raise many kinds
        raise errors.InputError(
            f"The Orbax checkpoint {step} is damaged or cannot be read "
            f"({type(error).__name__}: {checks.first_line(error)[:200]})."
        ) from error
    values = dict(zip(saved, keras.tree.flatten(loaded), strict=True))
    loaded = (values[name] for name in found)
    arrays = (np.asarray(value) if np.isscalar(value) else value for value in loaded)
    assign({"model": found.values()}, {f"model.{i}": array for i, array in enumerate(arrays)})


def _matched(model: keras.Model, saved: dict[str, Any], step: str) -> dict[str, keras.Variable]:
    """Return a model's variables by the names that they have in a checkpoint."""
    names = ("trainable_variables", "non_trainable_variables")
    groups = {name: getattr(model, name) for name in names}
    optimizer = getattr(model, "optimizer", None)
    if optimizer and any(name.startswith("optimizer_variables/") for name in saved):
        if not optimizer.built:
            with scope_of(model.trainable_variables[0]):
                optimizer.build(model.trainable_variables)
        groups["optimizer_variables"] = optimizer.variables
    here = _by_name({f"{group}/{v.path}": v for group in groups for v in groups[group]})
    there = _by_name({name: name for name in saved if name.partition("/")[0] in groups})
    for name in here | there:
        shape = tuple(here[name].shape) if name in here else None
        saved_shape = tuple(np.shape(saved[there[name]])) if name in there else None
        if shape != saved_shape:
            checks.fail(
                "The Orbax checkpoint is of another model.",
                checkpoint=step,
                first_that_differs=name,
                shape=shape,
                saved_shape=saved_shape,
                remedy="Build and compile it, and name its layers, as when it was saved.",
            )
    return {saved_name: here[name] for name, saved_name in there.items()}


def _by_name(named: dict[str, Any]) -> dict[str, Any]:
    """Return values by names without the process' numbers: seeds by their order."""
    seeds = {int(match[1] or 0): name for name in named if (match := _SEED.fullmatch(name))}
    ranks = {seeds[number]: f"seed {rank}" for rank, number in enumerate(sorted(seeds))}
    return {ranks.get(n, _OPTIMIZER.sub(r"\1/", n)): value for n, value in named.items()}


def _abstract(leaf: Any, variable: keras.Variable) -> Any:
    """Describe an array to be loaded: where JAX puts it, one of NumPy, or a number."""
    if np.isscalar(leaf):
        return leaf
    if keras.backend.backend() != "jax":
        return np.empty(leaf.shape, leaf.dtype)
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=variable.value.sharding)
