"""Values of Keras variables, by name."""

import contextlib
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from kdpkit._internal import checks


def values_of(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, np.ndarray]:
    """Read Keras variables, by group.

    Later steps do not change these arrays, which may be read-only.

    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> sorted(values_of({"model": model.variables}))
    ['model.0', 'model.1']
    """
    return {name: _read(variable) for name, variable in _by_name(variables).items()}


def _by_name(variables: Mapping[str, Iterable[keras.Variable]]) -> dict[str, keras.Variable]:
    return {
        f"{group}.{index}": variable
        for group, members in variables.items()
        for index, variable in enumerate(members)
    }


def _read(variable: keras.Variable) -> np.ndarray:
    value = variable.value
    with scope_of(variable):
        if hasattr(value, "read_value"):  # it adds up what TensorFlow's replicas hold
            value = value.read_value()
        if keras.backend.backend() == "torch":
            return keras.ops.convert_to_numpy(value)  # a copy: steps write into the same memory
        # On a CPU this copies nothing, and is safe: both backends copy memory that NumPy shares
        # before they write into it, also in steps that reuse the buffers of their state.
        if keras.backend.backend() == "jax":
            from kdpkit._internal import shards

            return shards.gather_to_host(value)
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
        ValueError: The variables of a group differ from the saved ones in number or shape.
    """
    for group, members in variables.items():
        present = {f"{group}.{i}": tuple(variable.shape) for i, variable in enumerate(members)}
        saved = {n: array.shape for n, array in arrays.items() if n.startswith(f"{group}.")}
        if present != saved:
            differs = next(n for n in present | saved if present.get(n) != saved.get(n))
            checks.fail(
                f"The saved state does not fit the {group}, which has {len(present)} variables; "
                f"the state has {len(saved)}.",
                first_that_differs=differs,
                shape=present.get(differs),
                saved_shape=saved.get(differs),
                remedy="Build and compile it as when it was saved, or use another directory.",
            )
    for name, variable in _by_name(variables).items():
        with scope_of(variable):
            variable.assign(arrays[name])
