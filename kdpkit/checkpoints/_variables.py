"""Values of Keras variables, by name."""

import contextlib
import itertools
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from kdpkit._internal import checks


def values_of(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, np.ndarray]:
    """Read Keras variables, by group.

    Later steps do not change these arrays, which may be read-only.

    >>> norm = keras.layers.LayerNormalization(center=False, name="norm")
    >>> norm.build((None, 3))
    >>> values_of({"model": norm.variables})
    {'model.0.norm/gamma': array([1., 1., 1.], dtype=float32)}
    """
    return {name: _read(variable) for name, variable in _by_name(variables).items()}


def _by_name(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, keras.Variable]:
    return {
        f"{group}.{index}.{variable.path}": variable
        for group, members in variables.items()
        for index, variable in enumerate(members)
    }


def _read(variable: keras.Variable) -> np.ndarray:
    value = variable.value
    with scope_of(variable):
        if hasattr(value, "read_value"):  # it adds up what TensorFlow's replicas hold
            value = value.read_value()
        # On a CPU this copies nothing, and is safe: both backends copy memory that NumPy shares
        # before they write into it, also in steps that reuse the buffers of their state.
        if keras.backend.backend() == "jax":
            from kdpkit.sharding._shards import gather_to_host

            return gather_to_host(value)
        return np.asarray(value)


def scope_of(variable: keras.Variable) -> contextlib.AbstractContextManager[object]:
    """Return the scope of the TensorFlow strategy that mirrors a variable, if any."""
    if keras.backend.backend() != "tensorflow":  # on JAX a failed step leaves no `value`
        return contextlib.nullcontext()
    strategy = getattr(variable.value, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def assign(
    variables: Mapping[str, Iterable[keras.Variable]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Assign values from `values_of` to Keras variables, all of a group or none.

    Raises:
        ValueError: The variables of a group differ from the saved ones in number, shape or path,
            except for numbers that Keras counts up in a process, as of `dense_7`, and outer scopes.
    """
    names = {}
    for group, members in variables.items():
        present = [(variable.path, tuple(variable.shape)) for variable in members]
        names[group] = [name for name in arrays if name.startswith(f"{group}.")]
        saved = [(name.split(".", 2)[2], arrays[name].shape) for name in names[group]]
        fits = operator.eq if sorted(present) == sorted(saved) else _fits
        for new, old in itertools.zip_longest(present, saved, fillvalue=("no variable", None)):
            if not fits(new, old):
                checks.fail(
                    f"The saved state does not fit the {group}, which has {len(present)} variables;"
                    f" the state has {len(saved)}. The first that differs is shown.",
                    variable=new,
                    saved=old,
                    remedy="Build and compile it as when it was saved, with the same names of "
                    "layers, or use another directory.",
                )
    for group, members in variables.items():
        for variable, name in zip(members, names[group], strict=True):
            with scope_of(variable):
                variable.assign(arrays[name])


def _fits(new: tuple[str, Any], old: tuple[str, Any]) -> bool:
    """Compare paths and shapes. An optimizer in another one is built in its scope, or outside."""
    paths = [re.sub(r"_\d+(?=[_./]|$)", "", f"/{path}") for path, _ in (new, old)]
    shorter, longer = sorted(paths, key=len)
    return new[1] == old[1] and longer.endswith(shorter)
