"""Steps on the global batch, of which every replica computes some layers for its part alone.

What a step of the user's own does with the examples of a batch (compare them, mix them, add them
up, draw for them, take the norm of their gradient) it does on all of them here, on every replica
alike, as on one device. Only calls of layers are divided: a replica takes its part of what the
layer is called on, and the outputs of all replicas are put together.

Parts are passed on: a divided layer, loss or metric that is called on another's output takes the
replica's part of it as it is. The tensor of all examples is there as well, and if nobody uses it
TensorFlow does not compute it.

Gradients: a tensor of the global batch is the same on all replicas, and so is its gradient. A
replica's part of a tensor has `replicas` times its gradient, so that the mean over the replicas is
right for variables of divided layers, of which each replica has a part, and for those that the step
uses itself, which each replica computes in full.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask

from kdpkit.training.tensorflow import _keras_internals
from kdpkit.training.tensorflow._collectives import concatenated, sums, with_gradient
from kdpkit.training.tensorflow._step import (
    ReplicaStep,
    current_step,
    dense_if_unique,
    of_any_length,
    running,
)
from kdpkit.training.tensorflow._whose_code import is_of_a_library


def divides_libraries(layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:  # noqa: ARG001
    """Divide layers of libraries alone."""
    return is_of_a_library(layer)


def step_on_global_batch(own: ReplicaStep, divides: Callable[..., bool] | None) -> ReplicaStep:
    """Return the step of a replica as if it had the examples of all replicas.

    Args:
        own: The step of the replica's own examples.
        divides: Returns whether the call of a layer is divided, from the layer and its arguments;
            None divides none.
    """
    step = copy.copy(own)
    step.own, step.divides = own, divides
    sizes = iter(own.sizes)

    def joined(leaf: Any) -> Any:
        if leaf is None:
            return None
        of_replicas = next(sizes)
        if not isinstance(leaf, tf.Tensor):
            return own.merge(concatenated, leaf)
        return join(step, _part(own, of_replicas), leaf)

    step.data = tf.nest.map_structure(joined, own.data)
    step.num_examples, step.start = own.num_global_examples, tf.constant(0)
    # Each of the replicas has them all.
    step.num_global_examples = own.num_global_examples * own.replicas
    step.share = tf.constant(1.0 / own.replicas)
    step.is_part, step.gathered = False, True
    return step


def own_part(step: ReplicaStep, outputs: Any) -> Any:
    """Return this replica's examples of what a step on the global batch gives."""
    if step.own is None:
        return outputs

    def part(output: Any) -> Any:
        if not _has_examples(output):
            return output
        return _taken(step, _part_for(step, output), output)

    return tf.nest.map_structure(part, outputs)


# Layers.


def call_divided(original: Callable, layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Call a layer; in a step on the global batch, if it may be, on this replica's part alone."""
    step = current_step()
    if step is None:
        return original(layer, *args, **kwargs)
    if not layer.built and step.is_here():
        step.merge(lambda strategy: _build(strategy, layer, args, kwargs))
    if step.divides is None or not step.is_here():
        return original(layer, *args, **kwargs)
    first = _first_with_examples((args, kwargs))
    if first is None or not step.divides(layer, args, kwargs):
        return original(layer, *args, **kwargs)
    step.divided.update(id(variable) for variable in layer.variables)
    part = _part_for(step, first)
    cut = functools.partial(_cut, step, part)
    args, kwargs = tf.nest.map_structure(cut, (args, kwargs))
    inner_layers = [inner for inner in layer._flatten_layers() if hasattr(inner, "_losses")]
    before = [len(inner._losses) for inner in inner_layers]
    with running(part):
        outputs = original(layer, *args, **kwargs)
    for inner, known in zip(inner_layers, before, strict=True):
        inner._losses[known:] = [_joined(step, part, loss) for loss in inner._losses[known:]]
    return tf.nest.map_structure(functools.partial(_joined, step, part), outputs)


def _build(strategy: Any, layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Build a layer on its first call, outside of the replicas, which all call it then."""
    with tf.init_scope(), strategy.scope():
        _keras_internals.build_layer(layer, args, kwargs)


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _first_with_examples(nest: Any) -> Any:
    """Return the tensor whose examples a call divides; None if it has none, or not for sure.

    The number of examples is not known while a step is traced: a tensor beside it whose length is
    known may be a constant for all, or have an entry for each example. One of length 1 is for all.
    """
    tensors = [leaf for leaf in tf.nest.flatten(nest) if _has_examples(leaf)]
    tensors = [leaf for leaf in tensors if leaf.shape[0] != 1]
    are_known = {leaf.shape[0] is not None for leaf in tensors}
    return tensors[0] if len(are_known) == 1 else None


def _part_for(step: ReplicaStep, tensor: tf.Tensor) -> ReplicaStep:
    """Return the step of this replica's part of some examples, cut where its examples are."""
    if (known := step.part_of(tensor)) is not None:
        return known.step
    own: Any = step.own
    num_examples, examples = tf.shape(tensor)[0], tf.maximum(own.num_global_examples, 1)
    ends = tf.cast(tf.cumsum(own.sizes[0]), tf.int64)
    ends = tf.cast(num_examples, tf.int64) * ends // tf.cast(examples, tf.int64)
    of_replicas = tf.cast(ends - tf.concat([[0], ends[:-1]], 0), tf.int32)
    return _part(own, of_replicas)


def _part(own: ReplicaStep, of_replicas: tf.Tensor) -> ReplicaStep:
    """Return the step of a replica's part of some examples, of which replicas have so many each."""
    start = tf.reduce_sum(tf.where(tf.range(own.replicas) < own.shard, of_replicas, 0))
    part = own.of_examples(of_replicas[own.shard])
    part.start, part.num_global_examples = start, tf.reduce_sum(of_replicas)
    part.share = part.share_as(tf.float32)
    part.share_in_loss = True  # what flows back to it has the shares already
    return part


def _cut(step: ReplicaStep, part: ReplicaStep, leaf: Any) -> Any:
    """Return a replica's part of a tensor, if that has the examples that the layer is called on."""
    if not _has_examples(leaf) or leaf.shape[0] == 1:
        return leaf
    shard = _taken(step, part, leaf)
    mask = get_keras_mask(leaf)
    if mask is not None and get_keras_mask(shard) is None:
        set_keras_mask(shard, _taken(step, part, mask))
    return shard


def _taken(step: ReplicaStep, part: ReplicaStep, x: Any) -> Any:
    """Return this replica's part of a tensor that is the same on all replicas."""
    if (known := step.part_of(x)) is not None:
        shard = _linked_part(step, known.step, known.tensor, x)
    else:
        num_examples = tf.shape(x)[0]
        is_cut = num_examples == part.num_global_examples
        start = tf.where(is_cut, part.start, 0)
        stop = tf.where(is_cut, part.start + part.num_examples, num_examples)
        shard = x[start:stop]
        if x.dtype.is_floating:
            gradient = functools.partial(_mean_at, step, start, stop, num_examples)
            shard = with_gradient(shard, x, gradient)
    if known is not None and (mask := get_keras_mask(known.tensor)) is not None:
        set_keras_mask(shard, mask)
    return shard


def _linked_part(step: ReplicaStep, part: ReplicaStep, shard: tf.Tensor, x: tf.Tensor) -> Any:
    """Return a replica's part, whose gradients flow to the tensor of all examples."""
    if not x.dtype.is_floating:
        return tf.identity(shard)
    return with_gradient(shard, x, lambda upstream: join(step, part, upstream / step.replicas))


def join(step: ReplicaStep, part: ReplicaStep, shard: tf.Tensor) -> Any:
    """Return the examples of all replicas, of which this replica's part is known from now on."""
    joined = of_any_length(step.merge(concatenated, shard))
    if shard.dtype.is_floating:

        def gradient(upstream: tf.Tensor) -> Any:
            return step.replicas * _taken(step, part, upstream)

        joined = with_gradient(joined, shard, gradient)
    elif tf.executing_eagerly():
        joined = tf.identity(joined)  # one for each replica
    step.know(joined, part, shard)
    return joined


def _mean_at(
    step: ReplicaStep, start: tf.Tensor, stop: tf.Tensor, num_examples: tf.Tensor, shard: tf.Tensor
) -> Any:
    """Return the mean over the replicas of what each has at some examples, and zeros elsewhere."""
    around = [[start, num_examples - stop]] + [[0, 0]] * (shard.shape.rank - 1)
    (total,) = step.merge(sums, [tf.pad(shard, around)])

    def gradient(upstream: tf.Tensor) -> Any:
        back = upstream[start:stop]
        return with_gradient(
            back, upstream, functools.partial(_mean_at, step, start, stop, num_examples)
        )

    return with_gradient(total / step.replicas, shard, gradient)


def _joined(step: ReplicaStep, part: ReplicaStep, output: tf.Tensor) -> Any:
    """Return the examples of all replicas; of a single number, the mean over the examples."""
    if not isinstance(output, tf.Tensor):
        return output
    if output.shape.rank == 0:
        return _mean_of_parts(step, part, output) if output.dtype.is_floating else output
    joined = join(step, part, output)
    if (mask := get_keras_mask(output)) is not None:
        set_keras_mask(joined, join(step, part, mask))
    return joined


def _mean_of_parts(step: ReplicaStep, part: ReplicaStep, value: Any) -> Any:
    (total,) = step.merge(sums, [part.weigh(value)])
    return with_gradient(total, value, lambda upstream: step.replicas * part.weigh(upstream))


# Losses and metrics.


def parts_of_known(step: ReplicaStep, nest: Any) -> tuple[ReplicaStep, Any] | None:
    """Return this replica's parts of tensors, if one of these is known to be put together.

    It is None where the step has computed all of them on the global batch, or where there may be
    other tensors than those of examples.
    """
    first = _first_with_examples(nest)
    if first is None or not step.is_here():
        return None
    known = [leaf for leaf in tf.nest.flatten(nest) if _has_examples(leaf) and step.part_of(leaf)]
    if not known:
        return None
    part = _part_for(step, known[0])
    return part, tf.nest.map_structure(functools.partial(_cut, step, part), nest)


def loss_of_parts(step: ReplicaStep, compute: Callable, *given: Any) -> Any:
    """Compute a library's loss on this replica's part; on the global batch if it has no part."""
    parts = parts_of_known(step, given)
    if parts is None:
        return compute(*given)
    part, cut = parts
    with running(part):
        value = compute(*cut)
    return _joined(step, part, value)


# Gradients of variables.


def gradient_of_variable(step: ReplicaStep, variable: Any, gradient: Any) -> Any:
    """Return the gradient of the global batch, of a variable of which a tape gave a replica's."""
    if gradient is None or not isinstance(variable, keras.Variable | tf.Variable):
        return gradient
    if isinstance(variable, keras.Variable) and id(variable) not in step.divided:
        return gradient  # every replica has all of it
    if not step.is_here():
        step.reject_divided()
        return gradient
    gradient = dense_if_unique(gradient)
    if not isinstance(gradient, tf.IndexedSlices):
        (total,) = step.merge(sums, [gradient])
        return with_gradient(total / step.replicas, gradient, lambda upstream: upstream)
    values, indices = (step.merge(concatenated, of) for of in (gradient.values, gradient.indices))
    return tf.IndexedSlices(values / step.replicas, indices, gradient.dense_shape)


def share_of_gradient(step: ReplicaStep, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return what this replica adds to a gradient that all replicas have in full."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / step.replicas
    values, indices = gradient.values, gradient.indices
    if not is_first():
        values, indices = values[:0], indices[:0]
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def addend_of_gradient(step: ReplicaStep, variable: Any, gradient: Any) -> Any:
    """Return what this replica adds to a gradient, of a loss whose parts the replicas add up."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if step.own is None or not is_sparse or id(variable) in step.divided:
        return step.if_examples(gradient)
    if not is_first():  # all have the same slices, which optimizers are not to see several times
        return tf.IndexedSlices(gradient.values[:0], gradient.indices[:0], gradient.dense_shape)
    values = gradient.values * step.replicas
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def is_first() -> bool:
    """Return, while it is traced, whether this is the first replica."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica)) == 0
