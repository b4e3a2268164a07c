"""The variables that a step reads and assigns: what they are called, and how they are put back."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdpkit._internal import held_variables
from kdpkit.training.tensorflow import _global_batch

_TAKEN_BACK = 5e-7  # of a variable's largest entry, which may be left of a change that was


def all_variables(model: keras.Model, components: Any) -> list[Any]:
    """List the variables of a model and its metrics, and others that a step's graph has, once."""
    kept = {id(v.value): v.value for v in (*model.variables, *model.metrics_variables)}
    kept |= {id(v): v for _, v in held_variables.variables_in_attributes(model)}
    known = {id(part) for variable in kept.values() for part in parts(variable)}
    for component in components:
        of = getattr(component.handle, "_distributed_container", None)
        variable = (of and of()) or component
        if id(component) not in known:
            kept[id(variable)] = variable
    return [*kept.values()]


def names(model: keras.Model, variables: list[Any]) -> dict[int, str]:
    """Name variables, by identity, but for the states of metrics, which add up."""
    of_metrics = {id(v.value) for v in model.metrics_variables}
    names = {
        id(v): v.name for v in variables if v.synchronization != tf.VariableSynchronization.ON_READ
    }
    names |= {id(v.value): v.path for v in model.variables}
    names |= {id(v): name for name, v in held_variables.variables_in_attributes(model)}
    return {key: name for key, name in names.items() if key not in of_metrics}


def switches(model: keras.Model, variables: list[Any], read: Any) -> list[Any]:
    """List what a step reads and does not learn: counts of steps, and weights of what it does.

    Frozen weights of libraries' layers are none of these: they weigh the entries of examples.

    Args:
        model: The model.
        variables: The variables to choose from.
        read: Variables that a step reads, or their components.
    """
    read = {id(variable) for variable in read}
    of_libraries = [v for layer in _layers_of_libraries(model) for v in layer.variables]
    learned = (*model.metrics_variables, *model.trainable_variables)
    others = {id(variable.value) for variable in (*learned, *of_libraries)}
    return [
        variable
        for variable in variables
        if id(variable) not in others
        and any(id(part) in read for part in parts(variable))
        and (variable.dtype.is_floating or (variable.dtype.is_integer and not variable.shape.rank))
    ]


def move(variables: list[Any], steps: int) -> None:
    """Have variables stand where they may after some steps."""
    for part in [part for variable in variables for part in parts(variable)]:
        if part.dtype.is_integer:
            part.assign_add(tf.cast(steps, part.dtype))
        else:
            part.assign(0.61 * part + 0.17)


def handles_of_libraries(model: keras.Model) -> set[int]:
    """Identify the handles of variables that layers and metrics of libraries alone assign."""
    metrics = [part for of in model.metrics for part in getattr(of, "metrics", [of])]
    owners = [
        *(metric for metric in metrics if _global_batch.is_metric_of_a_library(metric)),
        *_layers_of_libraries(model),
    ]
    return _handles(variable.value for owner in owners for variable in owner.variables)


def handles_that_add_up(model: keras.Model, variables: Sequence[Any]) -> set[int]:
    """Identify the handles of variables that hold sums over the replicas, as metrics do."""
    added = (v for v in variables if v.synchronization == tf.VariableSynchronization.ON_READ)
    return _handles(v.value for v in model.metrics_variables) | _handles(added)


def _handles(variables: Iterable[Any]) -> set[int]:
    return {id(part.handle) for variable in variables for part in parts(variable)}


def _layers_of_libraries(model: keras.Model) -> list[Any]:
    return [layer for layer in model._flatten_layers() if _global_batch.is_of_a_library(layer)]


def values(variables: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """Return the values of variables, for `restore`."""
    return [(v, [tf.identity(part) for part in parts(v)]) for v in variables]


def restore(saved: list[tuple[Any, list[Any]]]) -> None:
    """Restore the values that they had."""
    for variable, values in saved:
        for part, value in zip(parts(variable), values, strict=True):
            part.assign(value)


def largest_change(now: Any, before: Any) -> float:
    """Return the largest change of an entry that was finite; infinite if it no longer is."""
    changes = np.abs(np.subtract(now, before, dtype="float64")[np.isfinite(before)])
    return float(np.max(np.nan_to_num(changes, nan=np.inf), initial=0.0))


def has_changed(now: Any, before: Any) -> bool:
    """Return whether a variable has another value, but for what is left of a change taken back."""
    if np.array_equal(now, before):
        return False
    now, before = (np.asarray(value, "float64") for value in (now, before))
    left = _TAKEN_BACK * np.max(np.abs(before[np.isfinite(before)]), initial=0.0)
    return not np.allclose(now, before, rtol=0.0, atol=left, equal_nan=True)


def parts(variable: Any) -> Sequence[Any]:
    """Return the replicas' copies of a variable; itself if it has none."""
    return getattr(variable, "_values", None) or [variable]
