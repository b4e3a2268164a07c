"""Calls of layers, repeated once for each device on its part of the examples.

The step around them runs once, on all examples, as on one device. A part's call is a function of
its inputs and of the variables' values: each device reads its own copy, whose gradient goes to the
variable, and what the call assigns is assigned once, after all parts.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow import _batch_norm, _keras_internals, _tensor_parts, _xla
from kdpkit.training.tensorflow._collectives import sum_gradients
from kdpkit.training.tensorflow._library_layers import has_too_few_axes, is_written_by_libraries
from kdpkit.training.tensorflow._policy import is_batch_norm
from kdpkit.training.tensorflow._split import Split
from kdpkit.training.tensorflow._step import Part, Step, current_part, current_step, running
from kdpkit.training.tensorflow._tensor_parts import join_output, known_parts
from kdpkit.training.tensorflow._variable_copies import PartScope


def call_layer(original: Callable, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a layer; in a step, if it may be divided, once for each device on its part."""
    step = current_step()
    if step is None:
        return original(layer, *args, **kwargs)
    if current_part() is not None:
        if has_too_few_axes(layer, args, kwargs):
            _reject_few_axes(layer)
        return original(layer, *args, **kwargs)
    if not layer.built:
        _build(step, layer, args, kwargs)
    first = first_with_examples((args, kwargs)) if step.asks_policy() else None
    if first is None or not step.policy(layer, args, kwargs, as_one=step.jit):
        return original(layer, *args, **kwargs)
    if not is_written_by_libraries(layer) and not have_same_examples(step, (args, kwargs)):
        return original(layer, *args, **kwargs)  # its layers are asked
    return _called_on_parts(step, original, layer, first, args, kwargs)


def _called_on_parts(
    step: Step, original: Callable, layer: Any, first: Any, args: Any, kwargs: Any
) -> Any:
    arguments = Arguments(step, first, (args, kwargs))
    of, regularizer = arguments.split, layer.activity_regularizer
    wide: Any = contextlib.nullcontext(arguments.nests)
    if is_batch_norm(layer):
        wide = _batch_norm.on_wide_inputs(step, layer, arguments.nests)
    with _without_regularizer(layer), wide as calls:
        moments = (
            _batch_norm.moments_of_parts(step, layer, of, calls) if is_batch_norm(layer) else None
        )
        parts = [
            Part(step, index, of, moments=moments and moments[index]) for index in range(len(calls))
        ]
        outputs, scopes = _outputs(step, original, layer, parts, calls)
    arguments.drop_masks()
    _assign(step, of, scopes)
    _add_losses(step, of, layer, scopes)
    # A library's gives as many entries for each example as it was given.
    is_as_given = is_written_by_libraries(layer)
    known = {"length": first.shape[0], "each": arguments.each} if is_as_given else {}
    together = tf.nest.map_structure(
        lambda *of_parts: join_output(step, of, of_parts, **known), *outputs
    )
    if regularizer is not None:
        _regularize(layer, regularizer, together)
    return together


def _outputs(
    step: Step, original: Callable, layer: Any, parts: Sequence[Part], calls: Sequence[Any]
) -> tuple[list[Any], list[PartScope]]:
    """Call a layer on each device, on its part."""
    outputs, scopes = [], []
    read: dict[int, Any] = {}
    for part, (args, kwargs) in zip(parts, calls, strict=True):
        scope = PartScope(part, read)
        is_compiled = step.jit and _xla.may_compile(layer)
        call = _xla.compiled(original, scope) if is_compiled else original
        with running(step, part), tf.device(part.device), scope:
            outputs.append(call(layer, *args, **kwargs))
        scopes.append(scope)
    return outputs, scopes


class Arguments:
    """What a layer is called on, divided: the arguments for each device."""

    def __init__(self, step: Step, first: Any, nest: Any) -> None:
        self._step, self._first = step, first
        self._masked: list[tuple[Any, Sequence[Any]]] = []
        known = known_parts(step, first)
        self.split: Split = known.split if known else _tensor_parts.split_of(step, first)
        self.each = known.each if known else 1  # entries of `first` for each example
        others = {of.length_id: of.total for of in _splits(step, nest)}
        others.pop(self.split.length_id, None)
        self._checked = [
            tf.debugging.Assert(total == self.split.total, [OTHER_LENGTHS])
            for total in others.values()
        ]
        step.checks += self._checked
        divided = tf.nest.map_structure(self._divided, nest)
        devices = range(len(step.mesh.devices))
        self.nests = [tf.nest.map_structure(lambda of, at=at: of(at), divided) for at in devices]

    def _divided(self, leaf: Any) -> Callable:
        tensors = cut_leaf(self._step, self.split, leaf, has_all_examples=leaf is self._first)
        if tensors is None:
            for_all = (
                sum_gradients(self._step.mesh, leaf, self._step.channel())
                if isinstance(leaf, tf.Tensor)
                else leaf
            )
            return lambda _: for_all
        if leaf is self._first and self._checked:
            with tf.control_dependencies(self._checked):
                tensors = [*map(tf.identity, tensors)]
        if (mask := get_keras_mask(leaf)) is not None:
            masks: Any = cut_leaf(self._step, self.split, mask, has_all_examples=False)
            for tensor, of_mask in zip(tensors, masks, strict=True):
                set_keras_mask(tensor, of_mask)
            self._masked.append((leaf, tensors))
        if (logits := _keras_internals.get_logits(leaf)) is not None:
            of_logits: Any = cut_leaf(self._step, self.split, logits, has_all_examples=False)
            for tensor, of_tensor in zip(tensors, of_logits, strict=True):
                _keras_internals.set_logits(tensor, of_tensor)
        return lambda at: tensors[at]

    def drop_masks(self) -> None:
        """Take masks off that the call took off: Keras' attention does, of what others get too."""
        for leaf, tensors in self._masked:
            if get_keras_mask(tensors[0]) is None:
                set_keras_mask(leaf, None)


def cut_leaf(step: Step, of: Split, leaf: Any, *, has_all_examples: bool) -> Sequence[Any] | None:
    """Return the parts of a tensor with examples; None for what all devices get as it is."""
    if not has_examples(leaf) or leaf.shape[0] == 1:
        return None
    if has_all_examples or known_parts(step, leaf) is not None:
        return _tensor_parts.cut(step, leaf, of)
    return _tensor_parts.cut_if_of_length(step, leaf, of)


OTHER_LENGTHS = "A layer or a loss is called on tensors with different numbers of examples"


@contextlib.contextmanager
def explaining_other_lengths() -> Iterator[None]:
    """Raise a sentence where a divided layer got tensors of different lengths."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if OTHER_LENGTHS not in str(error):
            raise
        checks.fail(
            f"{OTHER_LENGTHS}, and each device would get its part of each.",
            remedy="Pass the layer to `replica_exact(model, undivided=[layer])`.",
        )


def _splits(step: Step, nest: Any) -> list[Split]:
    """Return how tensors are split that are known to have parts."""
    leaves = [leaf for leaf in tf.nest.flatten(nest) if has_examples(leaf) and leaf.shape[0] != 1]
    return [parts.split for leaf in leaves if (parts := known_parts(step, leaf)) is not None]


def have_same_examples(step: Step, nest: Any) -> bool:
    """Return whether all tensors of a call surely have the same number of examples."""
    leaves = [leaf for leaf in tf.nest.flatten(nest) if has_examples(leaf) and leaf.shape[0] != 1]
    known = [(leaf, known_parts(step, leaf)) for leaf in leaves]
    marks = {leaf.shape[0] if parts is None else parts.split.length_id for leaf, parts in known}
    return len(leaves) == 1 or (len(marks) == 1 and None not in marks)


def has_examples(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def first_with_examples(nest: Any) -> Any:
    """Return the tensor whose examples a call divides; None if it has none, or not for sure.

    The number of examples is mostly not known while a step is traced: a tensor beside it whose
    length is known may be a constant for all, or have an entry for each example. One of length 1
    is for all.
    """
    leaves = [leaf for leaf in tf.nest.flatten(nest) if getattr(leaf, "shape", None)]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):  # but ragged, or a variable
        return None
    tensors = [leaf for leaf in leaves if has_examples(leaf) and leaf.shape[0] != 1]
    lengths = {leaf.shape[0] for leaf in tensors}
    constant = {tf.get_static_value(leaf) is not None for leaf in tensors}
    return tensors[0] if len(lengths) == 1 and len(constant) == 1 else None


@contextlib.contextmanager
def _without_regularizer(layer: Any) -> Iterator[None]:
    """Hide an activity regularizer, which gets the outputs of all parts together."""
    regularizer = layer.activity_regularizer
    vars(layer)["activity_regularizer"] = None
    try:
        yield
    finally:
        vars(layer)["activity_regularizer"] = regularizer


def _regularize(layer: Any, regularizer: Any, outputs: Any) -> None:
    """Add the loss of an activity regularizer, as `Layer.__call__` does."""
    for output in tf.nest.flatten(outputs):
        if isinstance(output, tf.Tensor):
            loss = regularizer(output)
            if output.shape.rank and _keras_internals.MEAN_OF_REGULARIZERS:
                loss = tf.math.divide_no_nan(loss, tf.cast(tf.shape(output)[0], loss.dtype))
            layer.add_loss(loss)


def _assign(step: Step, of: Split, scopes: Sequence[PartScope]) -> None:
    """Assign once what the parts assigned: all the same, except for statistics of each part."""
    for variable in scopes[0].assigned.values():
        values = [scope.get_current_value(variable) for scope in scopes]
        is_of_parts = step.batch_norm == _batch_norm.REPLICA and values[0].dtype.is_floating
        variable.assign(_tensor_parts.mean_of_parts(step, of, values) if is_of_parts else values[0])


def _add_losses(step: Step, of: Split, layer: Any, scopes: Sequence[PartScope]) -> None:
    """Add what the parts of a layer that was declared as divided have added: the mean."""
    for values in zip(*(scope.losses for scope in scopes), strict=True):
        layer.add_loss(_tensor_parts.mean_of_parts(step, of, values))


def _build(step: Step, layer: Any, args: Any, kwargs: Any) -> None:
    with tf.init_scope(), step.mesh.strategy.scope():
        _keras_internals.build_layer(layer, args, kwargs)


def _reject_few_axes(layer: Any) -> None:
    checks.fail(
        "A layer gets a tensor of too few axes, and computes the examples of a batch together, "
        "inside of a layer that is divided.",
        layer=layer.name,
        kind=type(layer).__name__,
        remedy="Pass the layer that calls it to `replica_exact` in `undivided=[...]`.",
    )
