"""Steps on the global batch, of which every replica computes each layer for its share of examples.

What a step does with the examples of a batch together (compare them, mix them, add them up, take
the norm of their gradient) it does on all of them here, on every replica alike, as on one device.
Only the layers that it calls are divided: a replica takes its examples of what the layer is called
on, and the outputs of all replicas are put together.

Gradients: a tensor of the global batch is the same on all replicas, and so is its gradient. A
replica's part of a tensor has `replicas` times its gradient, so that the mean over the replicas is
right for variables of divided layers, of which each replica has a part, and for those that the step
uses itself, which each replica computes in full.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask

from kdpkit._internal import processes
from kdpkit.training.tensorflow._collectives import concatenated, sums, with_gradient
from kdpkit.training.tensorflow._step import (
    ReplicaStep,
    current_step,
    dense_if_unique,
    of_any_length,
    running,
)

_LIBRARIES = ("keras", "keras_hub", "keras_cv", "keras_rs", "tensorflow", "kdpkit", "builtins")


def divides_all(layer: keras.layers.Layer) -> bool:  # noqa: ARG001  # whatever it is
    """Divide every layer that a step calls."""
    return True


def is_of_a_library(layer: keras.layers.Layer) -> bool:
    """Divide layers of Keras alone: a user's own may compare the examples that it is called on."""
    parts = _layers(layer)
    operations = [op for part in parts for op in getattr(part, "operations", ())]
    return (
        all(map(_is_of_a_library, map(type, parts)))
        and all(isinstance(part, keras.layers.Layer) for part in operations)
        and not any(_may_compare_examples(part) for part in parts)
        and all(map(_is_of_a_library, _functions_in(parts)))
    )


# Names, because not every version of Keras has all of them.
_COMPARING = frozenset({"Lambda", "CutMix", "MixUp", "RandAugment", "AugMix"})


def _may_compare_examples(layer: keras.layers.Layer) -> bool:
    """Return whether a layer of a library computes with all examples together."""
    if type(layer).__name__ == "TextVectorization":  # it pads to the longest
        return layer._output_sequence_length is None
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    return type(layer).__name__ in _COMPARING or 0 in tf.nest.flatten(axes)


def _functions_in(layers: list[Any]) -> Iterator[Any]:
    """Iterate over the functions that layers call on what they are given: activations, say."""
    for layer in layers:
        for name, value in vars(layer).items():
            is_of_weights = name.endswith(("_initializer", "_constraint"))
            is_part = isinstance(value, keras.layers.Layer | keras.Variable | tf.Variable)
            if callable(value) and not is_of_weights and not is_part:
                yield value


def _is_of_a_library(code: Any) -> bool:
    return is_library(str(getattr(code, "__module__", None) or type(code).__module__))


def is_library(module: str) -> bool:
    """Return whether a module is of a library, by its name."""
    return module.partition(".")[0] in _LIBRARIES


def is_all_of_libraries(model: keras.Model) -> bool:
    """Return whether a model's layers and metrics, and the functions in these, are of libraries."""
    metrics = [part for of in model.metrics for part in getattr(of, "metrics", [of])]
    return is_of_a_library(model) and all(map(is_metric_of_a_library, metrics))


def is_metric_of_a_library(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric, and the function that it may have, are of a library."""
    return all(map(_is_of_a_library, (type(metric), getattr(metric, "_fn", type(metric)))))


def divides_none(layer: keras.layers.Layer) -> bool:  # noqa: ARG001  # whatever it is
    """Divide no layer: every replica computes all of them in full."""
    return False


# Which layers are divided, in the order in which it is tried.
DIVISIONS = (divides_all, is_of_a_library, divides_none)


def step_on_global_batch(own: ReplicaStep, divides: Callable[[Any], bool]) -> ReplicaStep:
    """Return the step of a replica as if it had the examples of all replicas.

    Args:
        own: The step of the replica's own examples.
        divides: Returns whether a layer is divided.
    """
    step = copy.copy(own)
    step.own, step.divides = own, divides
    step.data = tf.nest.map_structure(
        lambda leaf: None if leaf is None else of_any_length(own.merge(concatenated, leaf)),
        own.data,
    )
    step.num_examples, step.start = own.num_global_examples, tf.constant(0)
    # Each of the replicas has them all.
    step.num_global_examples = own.num_global_examples * own.replicas
    step.share = tf.constant(1.0 / own.replicas)
    step.is_part, step.gathered = False, True
    return step


def own_part(step: ReplicaStep, outputs: Any) -> Any:
    """Return this replica's examples of what a step on the global batch gives."""
    own = step.own
    if own is None:
        return outputs
    return tf.nest.map_structure(lambda x: x[own.start : own.start + own.num_examples], outputs)


def report(reason: str) -> None:
    """Report in one line that a step runs on the global batch, and why."""
    if processes.index() == 0:
        sys.stderr.write(
            f"kdpkit: {reason.removesuffix('.')}, so every replica runs this step on the global "
            "batch and computes its share of each layer.\n"
        )


def report_doubt(reason: str, remedy: str = "") -> None:
    """Report in one line what a step does that verification cannot answer for."""
    if processes.index() == 0:
        sys.stderr.write(
            f"kdpkit: {reason}. The few examples of the verification do not show it, but replicas "
            f"may train something other than one device on later batches. {remedy}".rstrip()
            + "\n"
        )


def report_python() -> None:
    """Report in one line that a step calls Python, whose state nobody can put back."""
    if processes.index() == 0:
        sys.stderr.write(
            "kdpkit: The step calls Python, in every replica and in its verification: what it "
            "counts or keeps there is not what one device would. Keep it in a variable, or count "
            "by `optimizer.iterations`.\n"
        )


def attach(model: keras.Model) -> None:
    """Have the layers of a model divided when a step on the global batch calls them."""
    for layer in _layers(model):
        if not getattr(layer.call, "is_divided", False):
            layer.call = _divided(layer, layer.call)


def _divided(layer: keras.layers.Layer, stock_call: Callable) -> Callable:
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
    step: ReplicaStep,
    layer: keras.layers.Layer,
    call: Callable,
    first: tf.Tensor,
    args: Any,
    kwargs: Any,
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


def _part_of(step: ReplicaStep, num_examples: tf.Tensor) -> ReplicaStep:
    """Return the step of this replica's part of some examples, cut where its examples are."""
    own: Any = step.own
    examples = tf.cast(tf.maximum(own.num_global_examples, 1), tf.int64)

    def offset(example: Any) -> Any:
        scaled = tf.cast(num_examples, tf.int64) * tf.cast(example, tf.int64) // examples
        return tf.cast(scaled, tf.int32)

    start, stop = offset(own.start), offset(own.start + own.num_examples)
    part = own.of_examples(stop - start)
    part.start, part.num_global_examples = start, num_examples
    part.share = part.share_as(tf.float32)
    # What flows back to it has the shares already, and what it computes is not the step's to note.
    part.share_in_loss, part.trial = True, None
    return part


def _cut(step: ReplicaStep, part: ReplicaStep, is_any_length: bool, leaf: Any) -> Any:
    """Return a replica's part of a tensor, if that has the examples that the layer is called on.

    They are as many, and both numbers are known while it is traced, or none: a constant or a
    variable may have as many entries as the batch has examples.
    """
    if not _has_examples(leaf) or (leaf.shape[0] is None) != is_any_length:
        return leaf
    num_examples = tf.shape(leaf)[0]
    is_cut = num_examples == part.num_global_examples
    start = tf.where(is_cut, part.start, 0)
    stop = tf.where(is_cut, part.start + part.num_examples, num_examples)
    shard = _slice(step, start, stop, leaf)
    if (mask := get_keras_mask(leaf)) is not None:
        set_keras_mask(shard, _cut(step, part, is_any_length, mask))
    return shard


def _slice(step: ReplicaStep, start: tf.Tensor, stop: tf.Tensor, x: Any) -> Any:
    """Return some examples, others on each replica, of a tensor that is the same on all."""
    if not x.dtype.is_floating:
        return x[start:stop]
    gradient = functools.partial(_mean_at, step, start, stop, tf.shape(x)[0])
    return with_gradient(x[start:stop], x, gradient)


def _mean_at(
    step: ReplicaStep, start: tf.Tensor, stop: tf.Tensor, num_examples: tf.Tensor, shard: tf.Tensor
) -> Any:
    """Return the mean over the replicas of what each has at some examples, and zeros elsewhere."""
    around = [[start, num_examples - stop]] + [[0, 0]] * (shard.shape.rank - 1)
    (total,) = step.merge(sums, [tf.pad(shard, around)])
    gradient = functools.partial(_slice, step, start, stop)
    return with_gradient(total / step.replicas, shard, gradient)


def _joined(step: ReplicaStep, part: ReplicaStep, output: tf.Tensor) -> Any:
    """Return the examples of all replicas; of a single number, the mean over the examples."""
    if not isinstance(output, tf.Tensor):
        return output
    if output.shape.rank == 0:
        return _mean_of_parts(step, part, output) if output.dtype.is_floating else output
    if (mask := get_keras_mask(output)) is not None:
        mask = step.merge(concatenated, mask)
    joined = _gathered(step, part, output)
    if mask is not None:
        set_keras_mask(joined, mask)
    return joined


def _gathered(step: ReplicaStep, part: ReplicaStep, output: tf.Tensor) -> Any:
    count = tf.shape(output)[0]
    start = part.start * (count // tf.maximum(part.num_examples, 1))

    def gradient(upstream: tf.Tensor) -> Any:
        return step.replicas * _slice(step, start, start + count, upstream)

    return with_gradient(step.merge(concatenated, output), output, gradient)


def _mean_of_parts(step: ReplicaStep, part: ReplicaStep, value: Any) -> Any:
    (total,) = step.merge(sums, [part.weigh(value)])
    return with_gradient(total, value, lambda upstream: step.replicas * part.weigh(upstream))


def gradient_of_variable(step: ReplicaStep, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return the gradient of the global batch, of a variable of which a tape gave a replica's."""
    if step.divides is divides_none:
        return (
            gradient  # every replica has all of it; R times a slice of 1 / R is squared otherwise
        )
    gradient = dense_if_unique(gradient)
    if not isinstance(gradient, tf.IndexedSlices):
        (total,) = step.merge(sums, [gradient])
        return with_gradient(total / step.replicas, gradient, lambda upstream: upstream)
    values, indices = (step.merge(concatenated, of) for of in (gradient.values, gradient.indices))
    return tf.IndexedSlices(values / step.replicas, indices, gradient.dense_shape)


def share_of_gradient(step: ReplicaStep, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return what this replica adds to a gradient that all replicas have in full."""
    if not isinstance(gradient, tf.IndexedSlices):
        return step.weigh(gradient)
    values, indices = gradient.values, gradient.indices
    if not is_first():
        values, indices = values[:0], indices[:0]
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def is_first() -> bool:
    """Return, while it is traced, whether this is the first replica."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica)) == 0


def _layers(layer: keras.layers.Layer) -> list[Any]:
    return [part for part in layer._flatten_layers() if isinstance(part, keras.layers.Layer)]
