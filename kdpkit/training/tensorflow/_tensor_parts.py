"""Tensors that are divided over devices: cut, put together, and passed on.

A tensor of all examples is put together from its parts wherever a layer was divided, and the parts
are known from then on: the next divided layer takes them as they are. In a graph TensorFlow leaves
out what nobody uses, mostly the tensor of all examples. Operations between two layers that compute
each number by itself are repeated on the parts, too (`_elementwise`).

Gradients take the same way back: what a layer gives a part's gradient is put together, its parts
are known, and they are passed on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit.training._keras_internals import get_keras_mask, set_keras_mask
from kdpkit.training.tensorflow import _elementwise
from kdpkit.training.tensorflow._collectives import Channel, gathered, summed, total
from kdpkit.training.tensorflow._keras_internals import (
    get_logits,
    is_differentiable,
    set_logits,
    unrecorded,
    with_gradient,
)
from kdpkit.training.tensorflow._split import Split, entries_of_each, of_all_examples, of_any_length
from kdpkit.training.tensorflow._split import split as split_entries
from kdpkit.training.tensorflow._step import Step, key


class Parts(NamedTuple):
    """A tensor's parts on the devices, of which examples they are, and its entries for each."""

    tensors: Sequence[Any]
    split: Split
    each: Any = 1


def known_parts(step: Step, tensor: Any) -> Parts | None:
    """Return the parts of a tensor that was put together, or computed from such entry by entry."""
    if not tf.is_symbolic_tensor(tensor):
        return None
    known = step.parts.get(key(tensor))
    if known is None and tensor.shape.rank:
        if key(tensor) in step.on_host:
            known = _parts_of_batch(step, tensor)
        else:
            known = _elementwise.repeated(step, tensor, known_parts)
        if known is not None:
            step.parts[key(tensor)] = known
    return known


def _parts_of_batch(step: Step, tensor: Any) -> Parts:
    """Cut a tensor of the step's batch."""
    split = split_of(step, tensor)
    with unrecorded():
        return Parts(_cut(step, tensor, split, 1), split)


def split_of(step: Step, tensor: Any) -> Split:
    """Return how the entries of a tensor are split; those of as many, if that is known, alike."""
    with tf.device("CPU:0"):
        total = tf.shape(tensor)[0]
    mesh, known = step.mesh, tensor.shape[0]
    length_id = object() if known is None else known
    return split_entries(total, mesh.num_parts, mesh.local, length_id)


def take(step: Step, tensor: Any, channel: Channel | None = None) -> Sequence[Any]:
    """Return known parts for use; their gradients flow into that of the tensor."""
    parts: Any = known_parts(step, tensor)
    return _flowing_into(step, tensor, parts, channel or step.channel())


def cut(step: Step, tensor: Any, split: Split) -> Sequence[Any]:
    """Return the parts of a tensor, which has an entry for each example, on their devices."""
    if known_parts(step, tensor) is not None:
        return take(step, tensor)
    parts = Parts(_cut(step, tensor, split, 1), split)
    return _flowing_into(step, tensor, parts, step.channel())


def _flowing_into(step: Step, tensor: Any, parts: Parts, channel: Channel) -> Sequence[Any]:
    """Return the parts of a tensor; their gradients, put together, flow into that of the tensor."""
    if not is_differentiable(tensor):
        return parts.tensors

    def gradient(*upstream: Any) -> Any:
        tensors = [*map(tf.convert_to_tensor, upstream)]
        return join(step, parts._replace(tensors=tensors), channel.of_gradient())

    return with_gradient([*parts.tensors], tensor, gradient)


def _cut(step: Step, tensor: Any, split: Split, each: Any) -> list[Any]:
    is_on_host = tf.is_symbolic_tensor(tensor) and key(tensor) in step.on_host
    source = "CPU:0" if is_on_host else step.mesh.home
    tensors = []
    for device, start, count in zip(step.mesh.devices, split.starts, split.counts, strict=True):
        with tf.device(source):
            part = tensor[start * each : (start + count) * each]
        with tf.device(device):
            tensors.append(of_any_length(tf.identity(part)))
    return tensors


def join(step: Step, parts: Parts, channel: Channel | None = None) -> Any:
    """Put the parts of a tensor together; they are known from then on."""
    channel = channel or step.channel()
    tensors, split, each = parts
    with tf.device(step.mesh.home):
        whole = tf.concat(tensors, 0)
        if step.mesh.num_processes > 1:
            size = -(-split.total // step.mesh.num_parts) * len(tensors) * each
            whole = gathered(step.mesh, whole, size, channel)
        whole = of_all_examples(whole, split, each)
    if is_differentiable(tensors[0]):

        def gradient(upstream: Any) -> Any:
            upstream = tf.convert_to_tensor(upstream)
            if known_parts(step, upstream):
                return take(step, upstream, channel.of_gradient())
            return _padded(step, upstream, parts)

        whole = with_gradient(whole, list(tensors), gradient)
    step.parts[key(whole)] = parts
    return whole


def _padded(step: Step, upstream: Any, parts: Parts) -> list[Any]:
    """Cut a gradient; that of what was borrowed is zero."""
    own = parts.split._replace(counts=parts.split.kept)
    padded = []
    for device, tensor, part in zip(
        step.mesh.devices, _cut(step, upstream, own, parts.each), parts.tensors, strict=True
    ):
        with tf.device(device):
            missing = tf.shape(part)[0] - tf.shape(tensor)[0]
            around = [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)
            padded.append(tf.pad(tensor, around))
    return padded


def join_output(
    step: Step,
    split: Split,
    outputs: Sequence[Any],
    *,
    length: int | None = None,
    each: Any = None,
) -> Any:
    """Put together what a layer gives on each device, with its Keras mask and its logits.

    Args:
        step: The step.
        split: Which examples each device has.
        outputs: What it gives.
        length: How many entries there are, if that is known.
        each: How many for each example, if that is known.
    """
    first = outputs[0]
    if not isinstance(first, tf.Tensor):
        return first
    if first.shape.rank == 0:
        return mean_of_parts(step, split, outputs) if first.dtype.is_floating else first
    each = entries_of_each(first, split.counts[0]) if each is None else each
    whole = join(step, Parts(outputs, split, each))
    whole.set_shape([length, *whole.shape[1:]])
    for get, put in ((get_keras_mask, set_keras_mask), (get_logits, set_logits)):
        of_parts = [get(output) for output in outputs]
        if of_parts[0] is not None:
            put(whole, join(step, Parts(of_parts, split, each)))
    return whole


def mean_of_parts(step: Step, split: Split, values: Sequence[Any]) -> Any:
    """Return the mean over the examples of numbers that are means over parts of them."""
    weighed = []
    for value, count in zip(values, split.kept, strict=True):
        weight = tf.math.divide_no_nan(*(tf.cast(n, tf.float32) for n in (count, split.total)))
        moved = to(step.mesh.home, value)
        weighed.append(tf.math.multiply_no_nan(moved, tf.cast(weight, moved.dtype)))
    return summed(step.mesh, tf.add_n(weighed), step.channel())


def to(device: str, tensor: Any) -> Any:
    """Return a tensor on another device; its gradient is computed where the tensor is."""
    source = tensor.device
    with tf.device(device):
        moved = tf.identity(tensor)
    if not is_differentiable(tensor):
        return moved

    def gradient(upstream: Any) -> Any:
        with tf.device(source):
            return tf.identity(tf.convert_to_tensor(upstream))

    return with_gradient(moved, tensor, gradient)


def cut_if_of_length(step: Step, tensor: Any, split: Split) -> Sequence[Any]:
    """Return the parts of a tensor that has an entry for each example; else all of it, to all."""
    length, channel = tf.shape(tensor)[0], step.channel()
    is_cut = length == split.total
    starts = [tf.where(is_cut, start, 0) for start in split.starts]
    counts = [tf.where(is_cut, count, length) for count in split.counts]
    parts = _cut(step, tensor, split._replace(starts=starts, counts=counts), 1)
    if not is_differentiable(tensor):
        return parts

    def gradient(*upstream: Any) -> Any:
        with tf.device(step.mesh.home):
            tensors = [*map(tf.convert_to_tensor, upstream)]
            size = -(-split.total // step.mesh.num_parts) * len(tensors)
            of_cut, of_all = channel.of_gradient(), channel.of_gradient()
            return tf.cond(
                is_cut,
                lambda: gathered(step.mesh, tf.concat(tensors, 0), size, of_cut)[:length],
                lambda: total(step.mesh, tf.add_n(tensors), of_all),
            )

    return with_gradient(parts, tensor, gradient)
