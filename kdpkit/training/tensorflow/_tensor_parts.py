"""Tensors that are divided over devices: cut, joined, and passed on.

Where a layer was divided its output is joined, and the parts of the joined tensor are known from
then on: the next divided layer takes the parts. In a graph TensorFlow leaves out what nobody uses,
mostly the joined tensor. Operations between two layers that compute each number by itself are
repeated on the parts, too (`_elementwise`). Gradients take the same way back: the parts of a joined
gradient are known, and are passed on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit.training.tensorflow import _elementwise
from kdpkit.training.tensorflow._collectives import Channel, gathered, summed, total
from kdpkit.training.tensorflow._keras_internals import (
    ATTACHED_TENSORS,
    is_differentiable,
    stop_recording,
    with_gradient,
)
from kdpkit.training.tensorflow._split import Split, entries_per_example, with_unknown_length
from kdpkit.training.tensorflow._split import split as split_entries
from kdpkit.training.tensorflow._step import Step, key


class Parts(NamedTuple):
    """A tensor's parts on the devices, how its examples are split, and its entries for each."""

    tensors: Sequence[Any]
    split: Split
    per_example: Any = 1


def known_parts(step: Step, tensor: Any) -> Parts | None:
    """Return the parts of a tensor that was joined, or computed entry by entry from such."""
    if not tf.is_symbolic_tensor(tensor):
        return None
    parts = step.parts.get(key(tensor))
    if parts is None and tensor.shape.rank:
        if key(tensor) in step.batch_keys:
            split = split_of(step, tensor)
            with stop_recording():
                parts = Parts(_cut(step, tensor, split), split)
        else:
            parts = _elementwise.repeated(step, tensor, known_parts)
        if parts is not None:
            step.parts[key(tensor)] = parts
    return parts


def split_of(step: Step, tensor: Any) -> Split:
    """Return how the entries of a tensor are split."""
    with tf.device("CPU:0"):
        length = tf.shape(tensor)[0]
    mesh, static_length = step.mesh, tensor.shape[0]
    length_id = object() if static_length is None else static_length
    return split_entries(length, mesh.num_parts, mesh.local, length_id)


def cut(
    step: Step, tensor: Any, split: Any = None, channel: Channel | None = None
) -> Sequence[Any]:
    """Return the parts of a tensor on their devices; their gradients flow into the tensor's.

    If its parts are not known it has an entry for each example, which the split divides.
    """
    parts, channel = known_parts(step, tensor), channel or step.channel()
    if parts is None:
        parts = Parts(_cut(step, tensor, split), split)
    if not is_differentiable(tensor):
        return parts.tensors

    def gradient(*upstream: Any) -> Any:
        tensors = [*map(tf.convert_to_tensor, upstream)]
        return join(step, parts._replace(tensors=tensors), channel.of_gradient())

    return with_gradient([*parts.tensors], tensor, gradient)


def _cut(step: Step, tensor: Any, split: Any, per_example: Any = 1) -> list[Any]:
    is_on_host = tf.is_symbolic_tensor(tensor) and key(tensor) in step.batch_keys
    source = "CPU:0" if is_on_host else step.mesh.home
    tensors = []
    for device, start, count in zip(step.mesh.devices, split.starts, split.counts, strict=True):
        with tf.device(source):
            part = tensor[start * per_example : (start + count) * per_example]
        with tf.device(device):
            tensors.append(with_unknown_length(tf.identity(part)))
    return tensors


def join(step: Step, parts: Parts, channel: Channel | None = None) -> Any:
    """Join the parts of a tensor, which are known from then on."""
    channel = channel or step.channel()
    tensors, split, per_example = parts
    with tf.device(step.mesh.home):
        joined = tf.concat(tensors, 0)
        if step.mesh.num_processes > 1:
            size = -(-split.total // step.mesh.num_parts) * len(tensors) * per_example
            joined = gathered(step.mesh, joined, size, channel)
        # Borrowed examples come last, and are cut off.
        if isinstance(per_example, int) and split.bounds:  # one entry for each example
            begin, end, strides = split.bounds
            joined = tf.raw_ops.StridedSlice(input=joined, begin=begin, end=end, strides=strides)
        else:
            joined = joined[: split.total * per_example]
    if is_differentiable(tensors[0]):

        def gradient(upstream: Any) -> Any:
            upstream = tf.convert_to_tensor(upstream)
            if known_parts(step, upstream):
                return cut(step, upstream, channel=channel.of_gradient())
            return _padded(step, upstream, parts)

        joined = with_gradient(joined, list(tensors), gradient)
    step.parts[key(joined)] = parts
    return joined


def _padded(step: Step, upstream: Any, parts: Parts) -> list[Any]:
    """Cut a gradient; that of a borrowed example is zero."""
    split = parts.split._replace(counts=parts.split.unborrowed)
    gradients = _cut(step, upstream, split, parts.per_example)
    padded = []
    for device, gradient, part in zip(step.mesh.devices, gradients, parts.tensors, strict=True):
        with tf.device(device):
            missing = tf.shape(part)[0] - tf.shape(gradient)[0]
            padded.append(tf.pad(gradient, [[0, missing]] + [[0, 0]] * (gradient.shape.rank - 1)))
    return padded


def join_output(
    step: Step,
    split: Split,
    outputs: Sequence[Any],
    *,
    length: int | None = None,
    per_example: Any = None,
) -> Any:
    """Join what a layer returns on each device, with its Keras mask and its logits.

    The number of all entries, and of those for each example, are passed if they are known.
    """
    first = outputs[0]
    if not isinstance(first, tf.Tensor):
        return first
    if first.shape.rank == 0:
        return mean_of_parts(step, split, outputs) if first.dtype.is_floating else first
    if per_example is None:
        per_example = entries_per_example(first, split.counts[0])
    joined = join(step, Parts(outputs, split, per_example))
    joined.set_shape([length, *joined.shape[1:]])
    for get, attach in ATTACHED_TENSORS:
        attached = [get(output) for output in outputs]
        if attached[0] is not None:
            attach(joined, join(step, Parts(attached, split, per_example)))
    return joined


def mean_of_parts(step: Step, split: Split, values: Sequence[Any]) -> Any:
    """Return the mean over all examples of numbers that are means over the parts' examples."""
    terms = []
    for value, count in zip(values, split.unborrowed, strict=True):
        weight = tf.math.divide_no_nan(*(tf.cast(n, tf.float32) for n in (count, split.total)))
        moved = moved_to(step.mesh.home, value)
        terms.append(tf.math.multiply_no_nan(moved, tf.cast(weight, moved.dtype)))
    return summed(step.mesh, tf.add_n(terms), step.channel())


def moved_to(device: str, tensor: Any) -> Any:
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
    tensors = _cut(step, tensor, split._replace(starts=starts, counts=counts))
    if not is_differentiable(tensor):
        return tensors

    def gradient(*upstream: Any) -> Any:
        with tf.device(step.mesh.home):
            gradients = [*map(tf.convert_to_tensor, upstream)]
            size = -(-split.total // step.mesh.num_parts) * len(gradients)
            of_cut, of_uncut = channel.of_gradient(), channel.of_gradient()
            return tf.cond(
                is_cut,
                lambda: gathered(step.mesh, tf.concat(gradients, 0), size, of_cut)[:length],
                lambda: total(step.mesh, tf.add_n(gradients), of_uncut),
            )

    return with_gradient(tensors, tensor, gradient)
