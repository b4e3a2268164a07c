"""Rematerialization: blocks of a model whose inner activations the backward pass computes again.

A call of a block becomes a function of its tensors and of the variables that it reads. So it
assigns variables once, and its dropout draws the same numbers when it is computed again.
`keras.RematScope` fails if a layer has a state: docs/upstream/keras_remat_and_state.py
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras

from kdpkit._internal import Tensor, checks
from kdpkit.training._keras_internals import get_keras_mask, get_stateless_scope, set_keras_mask

Model = TypeVar("Model", bound=keras.Model)


def remat(model: Model) -> Model:
    """Keep only the inputs of a model's blocks for the backward pass, which computes them again.

    This is rematerialization, or gradient checkpointing: a step needs less memory and up to a third
    more work, and trains the same weights, with dropout, batch statistics and losses of layers. It
    holds in `fit` and in a step of your own, on one device or, with `replica_exact`, on several;
    `evaluate` and `predict` do what they did. On TensorFlow it saves memory in a `tf.function`, as
    `fit` has it, not with `run_eagerly`. The model is saved and loaded as before.

    Args:
        model: A model with blocks, which are layers that contain layers, such as
            `keras_hub.layers.TransformerDecoder` or a `keras.Sequential`; of a model inside the
            model these are its blocks. What a layer stores in its attributes, such as attention
            scores, cannot be read outside of its block.

    Returns:
        The same model. A second call changes nothing.

    Raises:
        ValueError: The model has no blocks.

    >>> block = keras.Sequential([keras.layers.Dense(64, "gelu"), keras.layers.Dense(4)])
    >>> model = remat(keras.Sequential([keras.Input((4,)), block, keras.layers.Dense(1)]))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 1)), verbose=0)
    """
    backend = checks.backend("`remat`", "tensorflow", "jax")
    checkpointed: Callable[[BlockCall], Result] = _on_jax
    if backend == "tensorflow":
        checkpointed = importlib.import_module("kdpkit.training.tensorflow._remat").checkpointed
    blocks = [*blocks_of(model)]
    if not blocks:
        checks.fail(
            "`remat` computes the inner activations of blocks again, and this model has none: no "
            "layer of it contains layers.",
            model=model.name,
            remedy="Group its layers, for example by `keras.Sequential`, or leave `remat` out.",
        )
    for block in blocks:
        if not hasattr(block.call, "kdpkit_remat"):
            # Not `setattr`, with which Keras looks for layers and variables to track.
            vars(block)["call"] = _rematerialized(block, checkpointed)
    return model


class Result(NamedTuple):
    """All tensors that a call of a block computes."""

    outputs: list[Tensor]  # in the order of `keras.tree.flatten`
    masks: list[Tensor | None]  # of the outputs
    losses: list[Tensor]  # of `add_loss` and activity regularizers
    assigned: list[Tensor]  # the new values of variables


class BlockScope(keras.StatelessScope):
    """Collects which variables are read and assigned in it, and assigns none.

    Variables have the values passed here, or else their current ones.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, Tensor]] = ()) -> None:
        super().__init__([*values], collect_losses=True)
        self._outer_scope = get_stateless_scope()
        self.read: list[tuple[keras.Variable, Tensor]] = []
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        key = id(variable)
        if key not in self.state_mapping:
            value = self._outer_scope and self._outer_scope.get_current_value(variable)
            value = _tensor(variable._value) if value is None else value
            if value is None:  # The variable is being created.
                return None
            self.state_mapping[key] = value
            self.read.append((variable, value))
        return self.state_mapping[key]

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


class BlockCall:
    """A call of a block, as a function of the tensors in its arguments."""

    def __init__(self, block: keras.Layer, call: Callable, arguments: Any) -> None:
        self.block = block
        self._call = call
        self._arguments = arguments
        self.tensors = [leaf for leaf in keras.tree.flatten(arguments) if _is_tensor(leaf)]
        self._masks = [*map(get_keras_mask, self.tensors)]
        self._output: Any = None  # of the last call, for its structure
        self._assigned: list[keras.Variable] = []

    def __call__(self, tensors: Sequence[Tensor], scope: BlockScope) -> Result:
        """Compute the block without side effects."""
        _set_masks(tensors, self._masks)
        args, kwargs = _with_tensors(self._arguments, tensors)
        with scope:
            self._output = self._call(*args, **kwargs)
        losses = {*map(id, scope.losses)}
        for layer in self.block._flatten_layers():
            layer._loss_ids.difference_update(losses)  # Later losses may get the same `id`.
        self._assigned = [*scope.assigned.values()]
        outputs = [leaf for leaf in keras.tree.flatten(self._output) if _is_tensor(leaf)]
        return Result(
            outputs=outputs,
            masks=[*map(get_keras_mask, outputs)],
            losses=scope.losses,
            assigned=[scope.get_current_value(variable) for variable in self._assigned],
        )

    def finish(self, result: Result) -> Any:
        """Assign variables and add losses as the block does, and return its output."""
        for variable, value in zip(self._assigned, result.assigned, strict=True):
            variable.assign(value)
        if result.losses:
            self.block.add_loss(result.losses)
        _set_masks(result.outputs, result.masks)
        return _with_tensors(self._output, result.outputs)


@contextlib.contextmanager
def rematerialized(model: keras.Model, is_on: bool) -> Iterator[None]:
    """Have a model do for a while what `remat` has it do."""
    former = [(block, vars(block).get("call")) for block in blocks_of(model)]
    if is_on:
        remat(model)
    try:
        yield
    finally:
        for block, call in former:
            if call is None:
                vars(block).pop("call", None)
            else:
                vars(block)["call"] = call


def is_rematerialized(model: keras.Model) -> bool:
    return any(hasattr(block.call, "kdpkit_remat") for block in blocks_of(model))


def blocks_of(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield the layers that contain layers; of a model inside the model its blocks."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from [*blocks_of(layer)] or [layer]
        elif layer._flatten_layers(include_self=False, recursive=False):
            yield layer


def _on_jax(block: BlockCall) -> Result:
    """Compute a block, and again for the gradients, of variables that the call reads as well."""
    import jax

    return jax.checkpoint(lambda tensors: block(tensors, BlockScope()))(block.tensors)


def _rematerialized(block: keras.Layer, checkpointed: Callable[[BlockCall], Result]) -> Callable:
    """Return a block's `call` that keeps only its inputs."""
    call, is_built = block.call, block.built

    @functools.wraps(call)
    def rematerialized_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_built
        block_call = BlockCall(block, call, (args, kwargs))
        if not is_built or not block_call.tensors:  # The first call builds layers in the block.
            is_built = True
            return call(*args, **kwargs)
        return block_call.finish(checkpointed(block_call))

    rematerialized_call.kdpkit_remat = True  # type: ignore[attr-defined]  # not to be done again
    return rematerialized_call


def _is_tensor(leaf: Any) -> bool:
    if keras.backend.backend() == "jax":
        import jax

        return isinstance(leaf, jax.Array)
    import tensorflow as tf

    return isinstance(leaf, tf.Tensor)


def _tensor(value: Any) -> Any:
    """Return a variable's value as a tensor; on TensorFlow in a replica that of its own copy."""
    if keras.backend.backend() == "jax" or value is None:
        return value
    import tensorflow as tf

    return tf.convert_to_tensor(value)


def _with_tensors(nest: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a nest whose tensors are replaced by others, in their order."""
    others = iter(tensors)
    return keras.tree.map_structure(lambda leaf: next(others) if _is_tensor(leaf) else leaf, nest)


def _set_masks(tensors: Iterable[Tensor], masks: Iterable[Tensor | None]) -> None:
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            set_keras_mask(tensor, mask)
