"""Rematerialization: blocks of a model whose inner activations the backward pass computes again.

A call of a block becomes a function of its tensors and of the variables that it reads. So it
assigns variables once, and its dropout draws the same numbers when it is computed again.
`keras.RematScope` fails if a layer has a state: docs/upstream/keras_remat_and_state.md
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from kdpkit._internal import Tensor, checks
from kdpkit.training._keras_internals import get_keras_mask, get_stateless_scope, set_keras_mask


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
def rematerialised(loop: Any, checkpointed: Callable[[BlockCall], Result]) -> Iterator[None]:
    """Trace a training step with rematerialized blocks, if the loop has `remat=True`.

    The backend's `checkpointed` computes a block now, and again for its gradient.
    """
    blocks = {id(block): block for block in blocks_of(loop.model) if loop.remat}.values()
    if loop.remat and not blocks:
        checks.fail(
            "`remat` computes the inner activations of blocks again, and this model has none: no "
            "layer of it contains layers.",
            model=loop.model.name,
            remedy="Group its layers, for example by `keras.Sequential`, or leave `remat` out.",
        )
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_replaced_call(block, checkpointed))
        yield


def blocks_of(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield the layers that contain layers; of a model inside the model its blocks."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from [*blocks_of(layer)] or [layer]
        elif layer._flatten_layers(include_self=False, recursive=False):
            yield layer


@contextlib.contextmanager
def _replaced_call(
    block: keras.Layer, checkpointed: Callable[[BlockCall], Result]
) -> Iterator[None]:
    attributes, call = vars(block), block.call
    former = {"call": call} if "call" in attributes else {}

    @functools.wraps(call)
    def rematerialised_call(*args: Any, **kwargs: Any) -> Any:
        block_call = BlockCall(block, call, (args, kwargs))
        return block_call.finish(checkpointed(block_call))

    # Not `setattr`, with which Keras looks for layers and variables to track.
    attributes["call"] = rematerialised_call
    try:
        yield
    finally:
        del attributes["call"]
        attributes.update(former)


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
