"""What layers assign while they train, such as moving statistics: the same on all replicas."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training.tensorflow._collectives import sums_for_variables
from kdpkit.training.tensorflow._keras_internals import MirroredVariable
from kdpkit.training.tensorflow._step import ReplicaStep
from kdpkit.training.tensorflow._whose_code import is_library, layers_of


def reject_states_of_examples(model: keras.Model) -> None:
    """Reject a layer that keeps a state for each example of a batch."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            checks.fail(
                "A stateful layer goes on from a state for each example of the batch before, and "
                "replicas split batches, so that examples meet other states. Use `stateful=False`, "
                "or one device.",
                layer=layer.name,
            )


# What a layer that is built in the step has from then on.
_LISTS_OF_KERAS = frozenset(
    ("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics", "_seed_generators")
)


# What a library's layer holds for others: losses, and the mask of a cell that a step calls.
_HELD_BY_LIBRARIES = ("_losses", "_dropout_mask", "_recurrent_dropout_mask")


def keep_apart(model: keras.Model, *, is_own: bool) -> None:
    """Keep what this replica's step leaves on layers apart: `add_loss`, and tensors in attributes.

    All replicas share the layers, and are traced alternately where they meet, as in batch
    statistics: what a layer holds would be another replica's afterwards.

    Args:
        model: The model.
        is_own: Whether the step is the user's, which may freeze layers for a part of it.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1 or "merge_call" in vars(context):
        return
    merge_call = context.merge_call
    layers = model._flatten_layers()
    shared = [(vars(layer), is_library(type(layer).__module__)) for layer in layers]

    def keeping(function: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = [
            (attributes, name, attributes[name])
            for attributes, of_library in shared
            for name in (attributes.keys() & _HELD_BY_LIBRARIES if of_library else attributes)
            if name in _HELD_BY_LIBRARIES
            or (name not in _LISTS_OF_KERAS and _holds_tensors(attributes[name]))
        ]
        put_back = noted(value for _, _, value in kept)
        flags = _flags(model) if is_own else []
        num_parts = _num_parts(model)
        merged = merge_call(function, args, kwargs)
        for attributes, name, value in kept:
            attributes[name] = value
        put_back()
        if _num_parts(model) == num_parts:  # else a flag may say that something has been made
            for attributes, name, value in flags:
                attributes[name] = value
        return merged

    context.merge_call = keeping


def _flags(model: keras.Model) -> list[tuple[dict[str, Any], str, bool]]:
    """Return what a step of the user's may switch: which parts are trained, and flags of layers."""
    layers = layers_of(model)
    own = [vars(layer) for layer in layers if not is_library(type(layer).__module__)]
    trained = [(vars(part), "_trainable") for part in [*layers, *model.variables]]
    flags = [(of, name) for of in own for name, value in of.items() if type(value) is bool]
    return [(of, name, of[name]) for of, name in [*trained, *flags]]


def _num_parts(model: keras.Model) -> int:
    """Return how many variables, layers and other objects there are."""
    attributes = [vars(layer) for layer in layers_of(model)]
    return len(model.variables) + sum(
        of is not None for values in attributes for of in values.values()
    )


# Python's own methods: those of Keras' containers track what is put into them.
_FILLING: dict[Any, Callable] = {list: list.extend, dict: dict.update, set: set.update}


def noted(values: Iterable[Any]) -> Callable[[], None]:
    """Note what is in containers among some values, and return what puts it back."""
    plain = [getattr(of, "__wrapped__", getattr(of, "_storage", of)) for of in values]
    contents = [
        (of, kind, kind(of)) for of in plain for kind in _FILLING if issubclass(type(of), kind)
    ]

    def put_back() -> None:
        for container, kind, content in contents:
            kind.clear(container)
            _FILLING[kind](container, content)

    return put_back


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a container of some or of nothing."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return not value or any(map(_holds_tensors, parts))
    return bool(tf.is_tensor(value))


def note(step: ReplicaStep, variable: Any) -> None:
    """Note that a step on a replica's examples assigns a variable: a layer's, if it is mirrored."""
    is_of_layer = isinstance(variable, MirroredVariable) and not variable.trainable
    if step.replicas > 1 and is_of_layer and variable.dtype.is_floating:
        step.assigned[id(variable)] = variable


def average(step: ReplicaStep) -> None:
    """Set all replicas to the same values of what the step assigned: the mean over examples.

    Keras lets them drift apart and saves the first replica's, and a replica without examples makes
    its own NaN.
    """
    # docs/upstream/keras_layer_state_differs_by_replica.md
    variables = [of for key, of in step.assigned.items() if key not in step.equal]
    if not variables:
        return
    weighed = [(step.own or step).weigh(tf.convert_to_tensor(variable)) for variable in variables]

    def assign(strategy: tf.distribute.Strategy, values: list[Any]) -> None:
        sums = sums_for_variables(strategy, values, variables)
        for of, new in zip(variables, sums, strict=True):
            strategy.extended.update(of, lambda v, new: v.assign(new), args=(new,), group=False)

    tf.distribute.get_replica_context().merge_call(assign, args=(weighed,))
