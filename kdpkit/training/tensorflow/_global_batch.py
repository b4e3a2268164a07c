"""Steps on the whole batch, of which every replica computes each layer for its share of examples.

What a step does with the examples of a batch together (compare them, mix them, add them up, take
the norm of their gradient) it does on all of them here, on every replica alike, as on one device.
Only the layers that it calls are divided: a replica takes its examples of what the layer is called
on, and the outputs of all replicas are put together.

Gradients: a tensor of the whole batch is the same on all replicas, and so is its gradient. A
replica's part of a tensor has `replicas` times its gradient, so that the mean over the replicas is
right for variables of divided layers, of which each replica has a part, and for those that the step
uses itself, of which each replica has the whole.
"""

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask

from kdpkit import _processes
from kdpkit.training.tensorflow._collectives import concatenated, sums
from kdpkit.training.tensorflow._step import ReplicaStep, current_step, dense_if_unique, running

_LIBRARIES = ("keras", "keras_hub", "keras_cv", "keras_rs")


def is_any(layer: Any) -> bool:  # noqa: ARG001  # every layer that a step calls is divided
    """Divide the layers that a step calls, whatever they are."""
    return True


def is_of_a_library(layer: Any) -> bool:
    """Divide layers of Keras alone: a user's own may compare the examples that it is called on."""
    parts = _layers(layer)
    operations = [op for part in parts for op in getattr(part, "operations", ())]
    return all(map(_is_of_a_library, map(type, parts))) and all(
        isinstance(part, keras.layers.Layer) and not isinstance(part, keras.layers.Lambda)
        for part in (*parts, *operations)
    )


def _is_of_a_library(code: Any) -> bool:
    return code.__module__.partition(".")[0] in _LIBRARIES


def is_all_of_libraries(model: Any) -> bool:
    """Tell whether a model's layers and metrics, and the functions in these, are of libraries."""
    metrics = [part for of in model.metrics for part in getattr(of, "metrics", [of])]
    return is_of_a_library(model) and all(map(is_metric_of_a_library, metrics))


def is_metric_of_a_library(metric: Any) -> bool:
    """Tell whether a metric, and the function that it may have, are of a library."""
    return all(map(_is_of_a_library, (type(metric), getattr(metric, "_fn", type(metric)))))


DIVISIONS = (is_any, is_of_a_library)  # which layers are divided; tried in this order


def step_on_whole_batch(own: ReplicaStep, divides: Callable[[Any], bool]) -> ReplicaStep:
    """Return the step of a replica as if it had the examples of all replicas.

    Args:
        own: The step of the replica's own examples.
        divides: Tells the layers that are divided.
    """
    step = copy.copy(own)
    step.own, step.divides = own, divides
    step.data = tf.nest.map_structure(
        lambda leaf: None if leaf is None else _of_any_length(own.merge(concatenated, leaf)),
        own.data,
    )
    step.rows, step.start, step.static_rows = own.all_rows, tf.constant(0), None
    step.all_rows = own.all_rows * own.replicas  # each of the replicas has them all
    step.share = tf.constant(1.0 / own.replicas)
    step.is_part, step.gathered = False, True
    return step


def _of_any_length(x: Any) -> Any:
    """Hide how many examples a tensor has, by which they are told from other axes."""
    if not isinstance(x, tf.Tensor) or tf.executing_eagerly():
        return x
    return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]])


def own_part(step: ReplicaStep, outputs: Any) -> Any:
    """Return this replica's examples of what a step on the whole batch gives."""
    own = step.own
    if own is None:
        return outputs
    return tf.nest.map_structure(lambda x: x[own.start : own.start + own.rows], outputs)


def tell(reason: str) -> None:
    """Say in one line that a step runs on the whole batch, and why."""
    if _processes.index() == 0:
        sys.stderr.write(
            f"kdpkit: {reason.removesuffix('.')}, so every replica runs this step on the whole "
            "batch and computes its share of each layer.\n"
        )


def tell_of_doubt(reason: str) -> None:
    """Say in one line what a step does that verification cannot answer for."""
    if _processes.index() == 0:
        sys.stderr.write(
            f"kdpkit: {reason}, which depends on how a batch is cut where not all replicas are on "
            "one side; the verification's few examples do not show it.\n"
        )


def attach(model: Any) -> None:
    """Have the layers of a model divided when a step on the whole batch calls them."""
    for layer in _layers(model):
        if not getattr(layer.call, "is_divided", False):
            layer.call = _divided(layer, layer.call)


def _divided(layer: Any, stock_call: Callable) -> Callable:
    @functools.wraps(stock_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None or step.divides is None or not step.divides(layer):
            return stock_call(*args, **kwargs)
        tensors = [leaf for leaf in tf.nest.flatten((args, kwargs)) if _has_examples(leaf)]
        if not tensors or tensors[0].shape[0] == 1:
            return stock_call(*args, **kwargs)
        return _in_parts(step, layer, stock_call, tensors[0], args, kwargs)

    call.is_divided = True  # type: ignore[attr-defined]  # marks what is divided already
    return call


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _in_parts(
    step: ReplicaStep, layer: Any, call: Callable, first: Any, args: Any, kwargs: Any
) -> Any:
    """Call a layer on this replica's part of its inputs, and put all outputs together."""
    part = _part_of(step, tf.shape(first)[0])
    of_examples = functools.partial(_cut, step, part, first.shape[0] is None)
    args, kwargs = tf.nest.map_structure(of_examples, (args, kwargs))
    with running(part):
        outputs = call(*args, **kwargs)
        added = [(inner, [*inner._losses]) for inner in _layers(layer)]
        for inner, _ in added:
            inner._losses.clear()
    for inner, losses in added:
        inner._losses.extend([_joined(step, part, loss) for loss in losses])
    return tf.nest.map_structure(functools.partial(_joined, step, part), outputs)


def _part_of(step: ReplicaStep, rows: Any) -> ReplicaStep:
    """Return the step of this replica's part of some rows, cut where its examples are."""
    own: Any = step.own
    examples = tf.cast(tf.maximum(own.all_rows, 1), tf.int64)

    def place(of_examples: Any) -> Any:
        return tf.cast(
            tf.cast(rows, tf.int64) * tf.cast(of_examples, tf.int64) // examples, tf.int32
        )

    start, stop = place(own.start), place(own.start + own.rows)
    part = own.of_rows(stop - start)
    part.start, part.all_rows = start, rows
    part.share = part.share_as(tf.float32)
    # What flows back to it has the shares already, and what it computes is not the step's to note.
    part.share_in_loss, part.trial = True, None
    return part


def _cut(step: ReplicaStep, part: ReplicaStep, is_any_length: bool, leaf: Any) -> Any:
    """Return a replica's part of a tensor, if that has the rows that the layer is called on.

    They are as many, and both numbers are known while it is traced, or none: a constant or a
    variable may have as many rows as the batch has.
    """
    if not _has_examples(leaf) or (leaf.shape[0] is None) != is_any_length:
        return leaf
    rows = tf.shape(leaf)[0]
    is_cut = rows == part.all_rows
    start = tf.where(is_cut, part.start, 0)
    stop = tf.where(is_cut, part.start + part.rows, rows)
    piece = _slice(step, start, stop, leaf)
    if (mask := get_keras_mask(leaf)) is not None:
        set_keras_mask(piece, _cut(step, part, is_any_length, mask))
    return piece


def _slice(step: ReplicaStep, start: Any, stop: Any, x: Any) -> Any:
    """Return some rows, which differ between the replicas, of a tensor that is the same on all."""
    if not x.dtype.is_floating:
        return x[start:stop]

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def slice_rows(x: Any) -> tuple[Any, Callable]:
        return x[start:stop], functools.partial(_mean_at, step, start, stop, tf.shape(x)[0])

    return slice_rows(x)


def _mean_at(step: ReplicaStep, start: Any, stop: Any, rows: Any, piece: Any) -> Any:
    """Return the mean over the replicas of what each has at some rows, and zeros elsewhere."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def mean_at(piece: Any) -> tuple[Any, Callable]:
        around = [[start, rows - stop]] + [[0, 0]] * (piece.shape.rank - 1)
        (total,) = step.merge(sums, [tf.pad(piece, around)])
        return total / step.replicas, functools.partial(_slice, step, start, stop)

    return mean_at(piece)


def _joined(step: ReplicaStep, part: ReplicaStep, output: Any) -> Any:
    """Return the rows of all replicas; of a single number, the mean over the examples."""
    if not isinstance(output, tf.Tensor):
        return output
    if output.shape.rank == 0:
        return _mean_of_parts(step, part, output) if output.dtype.is_floating else output
    if (mask := get_keras_mask(output)) is not None:
        mask = step.merge(concatenated, mask)
    whole = _gathered(step, part, output)
    if mask is not None:
        set_keras_mask(whole, mask)
    return whole


def _gathered(step: ReplicaStep, part: ReplicaStep, output: Any) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def gather(output: Any) -> tuple[Any, Callable]:
        count = tf.shape(output)[0]
        start = part.start * (count // tf.maximum(part.rows, 1))

        def gradient(upstream: Any) -> Any:
            return step.replicas * _slice(step, start, start + count, upstream)

        return step.merge(concatenated, output), gradient

    return gather(output)


def _mean_of_parts(step: ReplicaStep, part: ReplicaStep, value: Any) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def mean(value: Any) -> tuple[Any, Callable]:
        (total,) = step.merge(sums, [part.weigh(value)])
        return total, lambda upstream: step.replicas * part.weigh(upstream)

    return mean(value)


def gradient_of_variable(step: ReplicaStep, gradient: Any) -> Any:
    """Return the gradient of the whole batch, of a variable of which a tape gave a replica's."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def mean(gradient: Any) -> tuple[Any, Callable]:
        (total,) = step.merge(sums, [gradient])
        return total / step.replicas, lambda upstream: upstream

    gradient = dense_if_unique(gradient)
    if not isinstance(gradient, tf.IndexedSlices):
        return mean(gradient)
    values, indices = (step.merge(concatenated, of) for of in (gradient.values, gradient.indices))
    return tf.IndexedSlices(values / step.replicas, indices, gradient.dense_shape)


def share_of_gradient(step: ReplicaStep, gradient: Any) -> Any:
    """Return what this replica adds to a gradient that all replicas have in whole."""
    if not isinstance(gradient, tf.IndexedSlices):
        return step.weigh(gradient)
    values, indices = gradient.values, gradient.indices
    if not is_first():
        values, indices = values[:0], indices[:0]
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def is_first() -> bool:
    """Tell, while it is traced, whether this is the first replica."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica)) == 0


def _layers(layer: Any) -> list[Any]:
    return [part for part in layer._flatten_layers() if isinstance(part, keras.layers.Layer)]
