"""Calls of layers: a layer is called once for each device, on its part of the examples.

All devices (replicas; `step.mesh` has them) share a global batch, one batch of `fit`; the part of a
device is some of its examples. A step is what `fit` does with a global batch. It is traced once, as
on one device. Several processes, which train together, each with its own devices, trace the same
step. A library's layer, with all layers in it, was written by Keras or KerasHub, not by the user.

While a step is traced, `call_layer` replaces Keras' `Layer.__call__` and gets it as `original`. It
cuts a layer's arguments into parts, calls the layer on each device, and joins the outputs. These
calls are functions of inputs and of the variables' values: each device reads its own copies, whose
gradients go to the variables. What the calls assign is assigned once, after all of them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdpkit._internal import checks, versions
from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow import _batch_norm, _tensor_parts, _xla
from kdpkit.training.tensorflow._collectives import with_summed_gradient
from kdpkit.training.tensorflow._global_batches import OTHER_LENGTHS
from kdpkit.training.tensorflow._keras_internals import ATTACHED_TENSORS, build_layer
from kdpkit.training.tensorflow._library_layers import has_too_few_axes, is_written_by_libraries
from kdpkit.training.tensorflow._policy import is_batch_norm
from kdpkit.training.tensorflow._split import Split
from kdpkit.training.tensorflow._step import Part, Step, current_part, current_step, running
from kdpkit.training.tensorflow._tensor_parts import join_output, known_parts
from kdpkit.training.tensorflow._variable_copies import PartScope


def call_layer(original: Callable, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a layer; in a step, if `step.policy` divides it, once for each device on its part."""
    step = current_step()
    if step is None:
        return original(layer, *args, **kwargs)
    if current_part() is not None:  # This layer is in one that is being called on a part.
        if has_too_few_axes(layer, args, kwargs):
            _reject_few_axes(layer)
        return original(layer, *args, **kwargs)
    if not layer.built:
        # Variables are created outside of the step's graph, with a copy on each device.
        with tf.init_scope(), step.mesh.strategy.scope():
            build_layer(layer, args, kwargs)
    first = first_with_examples((args, kwargs)) if step.asks_policy() else None
    if first is None or not step.policy.divides(step, layer, args, kwargs):
        return original(layer, *args, **kwargs)
    if not is_written_by_libraries(layer) and not have_same_examples(step, (args, kwargs)):
        return original(layer, *args, **kwargs)  # The layers in it are asked about when called.
    return _call_on_parts(step, original, layer, first, args, kwargs)


def _call_on_parts(
    step: Step, original: Callable, layer: Any, first: Any, args: Any, kwargs: Any
) -> Any:
    arguments = Arguments(step, first, (args, kwargs))
    split, regularizer = arguments.split, layer.activity_regularizer
    moments: Sequence[Any] | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_regularizer(layer))
        calls: Any = arguments.by_device
        if is_batch_norm(layer):
            calls = stack.enter_context(_batch_norm.with_float32_inputs(step, layer, calls))
            moments = _batch_norm.moments_of_parts(step, layer, split, calls)
        parts = [
            Part(step, index, split, moments=moments and moments[index])
            for index in range(len(calls))
        ]
        outputs, scopes = _outputs(step, original, layer, parts, calls)
    arguments.remove_masks()
    _assign(step, split, scopes)
    for losses in zip(*(scope.losses for scope in scopes), strict=True):
        layer.add_loss(_tensor_parts.mean_of_parts(step, split, losses))
    # A library's layer keeps the length of the first axis, and so the number of entries for each
    # example; a user's may change it, and `join_output` finds it from the outputs.
    lengths: dict[str, Any] = {}
    if is_written_by_libraries(layer):
        lengths = {"length": first.shape[0], "per_example": arguments.entries_per_example}
    joined = tf.nest.map_structure(
        lambda *tensors: join_output(step, split, tensors, **lengths), *outputs
    )
    if regularizer is not None:
        _regularize(layer, regularizer, joined)
    return joined


def _outputs(
    step: Step, original: Callable, layer: Any, parts: Sequence[Part], calls: Sequence[Any]
) -> tuple[list[Any], list[PartScope]]:
    """Call a layer on each device; return the outputs, and what each call reads and assigns."""
    outputs, scopes = [], []
    values: dict[int, Any] = {}  # of variables by their ids, which all calls share
    for part, (args, kwargs) in zip(parts, calls, strict=True):
        scope = PartScope(part, values)
        is_compiled = step.jit and _xla.may_compile(layer)
        call = _xla.compiled(original, scope) if is_compiled else original
        with running(step, part), tf.device(part.device), scope:
            outputs.append(call(layer, *args, **kwargs))
        scopes.append(scope)
    return outputs, scopes


class Arguments:
    """The arguments of a call (`nest`), divided by the examples of one of them (`first`)."""

    def __init__(self, step: Step, first: Any, nest: Any) -> None:
        self._step, self._first = step, first
        self._masked: list[tuple[Any, Sequence[Any]]] = []
        parts = known_parts(step, first)
        self.split: Split = parts.split if parts else _tensor_parts.split_of(step, first)
        # More than 1 if a user's layer has reshaped its output to several entries for an example.
        self.entries_per_example = parts.per_example if parts else 1
        # Tensors of equal ids have equally many examples. Others are compared when the step runs.
        all_parts = [known_parts(step, tensor) for tensor in _with_examples(nest)]
        totals = {parts.split.length_id: parts.split.total for parts in all_parts if parts}
        totals.pop(self.split.length_id, None)
        self._assertions = [
            tf.debugging.Assert(total == self.split.total, [OTHER_LENGTHS])
            for total in totals.values()
        ]
        step.assertions += self._assertions
        divided = [self._divided(leaf) for leaf in tf.nest.flatten(nest)]
        self.by_device = [  # The arguments of each device's call.
            tf.nest.pack_sequence_as(nest, leaves) for leaves in zip(*divided, strict=True)
        ]

    def _divided(self, leaf: Any) -> Sequence[Any]:
        """Return what each device gets of an argument."""
        step = self._step
        tensors = self._cut(leaf)
        if tensors is None:
            if isinstance(leaf, tf.Tensor):  # Same value; the processes add up its gradients.
                leaf = with_summed_gradient(step.mesh, leaf, step.channel())
            return [leaf] * len(step.mesh.devices)
        if leaf is self._first and self._assertions:  # The call waits for them.
            with tf.control_dependencies(self._assertions):
                tensors = [*map(tf.identity, tensors)]
        for get, attach in ATTACHED_TENSORS:  # a mask, and the logits of a softmax
            if (attached := get(leaf)) is not None:
                parts: Any = self._cut(attached)
                for tensor, part in zip(tensors, parts, strict=True):
                    attach(tensor, part)
        if get_keras_mask(leaf) is not None:
            self._masked.append((leaf, tensors))
        return tensors

    def _cut(self, leaf: Any) -> Sequence[Any] | None:
        """Return the parts of a tensor with examples; None for what all devices get complete."""
        if not _may_have_examples(leaf):
            return None
        if leaf is self._first or known_parts(self._step, leaf) is not None:
            return _tensor_parts.cut(self._step, leaf, self.split)
        return _tensor_parts.cut_if_of_length(self._step, leaf, self.split)

    def remove_masks(self) -> None:
        """Remove the mask from a complete tensor where the call removed it from its parts.

        Keras' attention layers remove the masks of their inputs, and layers that are called later
        on the same tensor must see that, as on one device.
        """
        for tensor, parts in self._masked:
            if get_keras_mask(parts[0]) is None:
                set_keras_mask(tensor, None)


def _may_have_examples(leaf: Any) -> bool:
    """Return whether a leaf may have entries for each example: a single one is broadcast."""
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] != 1


def _with_examples(nest: Any) -> list[Any]:
    return [*filter(_may_have_examples, tf.nest.flatten(nest))]


def have_same_examples(step: Step, nest: Any) -> bool:
    """Return whether all tensors of a call are known to have the same number of examples."""
    leaves = _with_examples(nest)
    parts = [known_parts(step, leaf) for leaf in leaves]
    length_ids = {
        leaf.shape[0] if leaf_parts is None else leaf_parts.split.length_id
        for leaf, leaf_parts in zip(leaves, parts, strict=True)
    }
    return len(leaves) == 1 or (len(length_ids) == 1 and None not in length_ids)


def first_with_examples(nest: Any) -> Any:
    """Return the tensor whose examples a call divides; None if that is not certain.

    The number of examples is mostly unknown while a step is traced. A tensor of known length beside
    it may be a constant for all examples, or have an entry for each.
    """
    leaves = [leaf for leaf in tf.nest.flatten(nest) if getattr(leaf, "shape", None)]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):  # One is ragged, or a variable.
        return None
    tensors = _with_examples(nest)
    lengths = {tensor.shape[0] for tensor in tensors}
    are_constant = {tf.get_static_value(tensor) is not None for tensor in tensors}
    return tensors[0] if len(lengths) == 1 and len(are_constant) == 1 else None


@contextlib.contextmanager
def _without_regularizer(layer: Any) -> Iterator[None]:
    """Hide an activity regularizer from the calls on parts: it gets the joined outputs later."""
    regularizer = layer.activity_regularizer
    # `vars` does without Keras' `Layer.__setattr__`, which would track the attribute.
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
            if output.shape.rank and versions.KERAS >= (3, 14):  # keras-team/keras#22018
                loss = tf.math.divide_no_nan(loss, tf.cast(tf.shape(output)[0], loss.dtype))
            layer.add_loss(loss)


def _assign(step: Step, split: Split, scopes: Sequence[PartScope]) -> None:
    """Assign what the calls assigned: the same value, or the mean of each device's statistics."""
    for variable in scopes[0].assigned.values():
        value, *_ = values = [scope.get_current_value(variable) for scope in scopes]
        if step.batch_norm == _batch_norm.REPLICA and value.dtype.is_floating:
            value = _tensor_parts.mean_of_parts(step, split, values)
        variable.assign(value)


def _reject_few_axes(layer: Any) -> None:
    checks.fail(
        "A layer mixes the examples of an input with so few axes, and each device would mix only "
        "those of its part, because a layer around it is divided.",
        layer=layer.name,
        kind=type(layer).__name__,
        remedy="Pass the layer that calls it to `replica_exact` in `undivided=[...]`.",
    )
