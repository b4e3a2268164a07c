"""What is checked before a model trains: the scope that it was made in, and its datasets."""

import gc
from collections.abc import Iterable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from kdpkit import strategies
from kdpkit._internal import checks


def require_scope(owner: str, variables: Iterable[Any], strategy: tf.distribute.Strategy) -> None:
    """Raise unless variables were made in the scope of the strategy that trains them."""
    for variable in variables:
        if not is_in_scope([variable], strategy):
            name = getattr(variable, "path", variable.name)  # a `tf.Variable` has no path
            reject_scope(owner, strategy, variable=name)


def is_in_scope(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> bool:
    """Return whether variables, of Keras or of TensorFlow, were made in a strategy's scope."""
    values = (v if isinstance(v, tf.Variable) else v.value for v in variables)
    return all(map(strategy.extended.variable_created_in_scope, values))


def reject_scope(owner: str, strategy: Any, **received: Any) -> NoReturn:
    checks.fail(
        f"The {owner} was made outside the strategy's scope.",
        **received,
        strategy=type(strategy).__name__,
        remedy="Make it inside `with strategy.scope():`, of this very strategy.",
    )


_STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def require_supported(strategy: tf.distribute.Strategy) -> None:
    if not isinstance(strategy, _STRATEGIES):
        checks.fail(
            "`replica_exact` does not work under this strategy; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy, or for a model ParameterServerStrategy.",
            strategy=type(strategy).__name__,
        )


def require_no_strategy(owner: str, name: str) -> None:
    """Raise where what belongs to no strategy trains in a scope, or before any of the kit's own.

    The owner is a "model" or a "step".
    """
    if tf.distribute.has_strategy():
        reject_scope(owner, tf.distribute.get_strategy(), **{owner: name})
    if strategies._is_one_used.is_set() or not strategies._made:
        return
    gc.collect()  # A strategy has circular references.
    for strategy in strategies._made:
        checks.fail(
            f"The {owner} was made outside the strategy's scope, and would train on one device.",
            **{owner: name},
            strategy=strategies.describe(strategy),
            remedy=f"Make {'it' if owner == 'model' else 'its model and optimizer'} inside `with "
            "strategy.scope():`; for one device leave out `replica_exact`.",
        )


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


def check_dataset(name: str, dataset: Any, **steps: int | None) -> None:
    """Reject a dataset of tf.data that gives single examples, or that never ends.

    The number of batches to take is passed by the name that its argument has for the user.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return
    check_batched(name, dataset.element_spec)
    ((argument, num_steps),) = steps.items()
    if num_steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        checks.fail(f"`{name}` never ends; say with `{argument}` how much of it to take.")


def check_batched(name: str, spec: Any, *, is_one_length: bool = False) -> None:
    """Reject what is surely no batch: scalars, or if required tensors of different lengths."""
    shapes = [shape for leaf in tf.nest.flatten(spec) if (shape := _shape(leaf)) is not None]
    lengths = {shape[0] for shape in shapes if shape}
    if () in shapes and None in lengths:
        checks.fail(
            f"`{name}` gives single numbers beside batches, and replicas get parts of batches.",
            element_spec=spec,
            remedy="Repeat what is one number for a batch for each of its examples.",
        )
    if () in shapes or (is_one_length and len(lengths - {None}) > 1):
        checks.fail(
            f"`{name}` gives single examples; batch it with `.batch(global_batch_size)`.",
            element_spec=spec,
        )


def _shape(spec: tf.TypeSpec) -> tuple[int | None, ...] | None:
    spec_of_replica = getattr(spec, "_value_specs", (spec,))[0]
    shape = getattr(spec_of_replica, "shape", None)
    return None if shape is None or shape.rank is None else tuple(shape)
