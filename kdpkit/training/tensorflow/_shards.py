"""Shards of batches whose sizes are chosen: for verification, which cuts some examples twice."""

import functools
from typing import Any

import tensorflow as tf

from kdpkit import _checks
from kdpkit.training.tensorflow import _workers


def first_examples(strategy: Any, batch: Any, count: int) -> Any:
    """Put the first examples of a distributed batch together; a smaller batch is repeated."""
    batch = _workers.opened(batch)[0]

    def first(leaf: Any) -> Any:
        shards = strategy.experimental_local_results(leaf)
        if shards[0] is None or isinstance(shards[0], tf.experimental.Optional):
            return None
        if _workers.spans_processes(strategy):
            from kdpkit.training.tensorflow import _keras_internals

            return _repeated(_keras_internals.joined_over_processes(leaf, strategy), count)
        return _repeated(_concatenated([*shards]), count)

    return tf.nest.map_structure(first, batch)


def check_same_lengths(strategy: Any, batch: Any) -> None:
    """Raise an error if the parts of a batch have other numbers of examples."""
    batch = _workers.opened(batch)[0]
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    shards = [strategy.experimental_local_results(leaf) for leaf in leaves]
    shards = [of_leaf for of_leaf in shards if hasattr(of_leaf[0], "shape")]
    rows = [sum(int(_workers.rows_of(shard)) for shard in of_leaf) for of_leaf in shards]
    if len(set(rows)) > 1:
        _checks.refuse(
            "The parts of a batch must have equally many examples, along their first axis.",
            shapes=[(n, *of_leaf[0].shape[1:]) for n, of_leaf in zip(rows, shards, strict=True)],
            remedy="Put the axis of the examples first in each of them.",
        )


def can_be_gathered(strategy: Any, batch: Any) -> bool:
    """Tell whether examples can be put together: over processes, only numbers can."""
    leaves = tf.nest.flatten(_workers.opened(batch)[0])
    shards = [strategy.experimental_local_results(leaf)[0] for leaf in leaves if leaf is not None]
    return not _workers.spans_processes(strategy) or all(
        isinstance(shard, tf.Tensor) and shard.dtype != tf.string for shard in shards
    )


def _repeated(tensor: Any, count: int) -> Any:
    while _workers.rows_of(tensor) < count:
        if not _workers.rows_of(tensor):
            break
        tensor = _concatenated([tensor, tensor])
    return _workers.sliced(tensor, 0, count)


def _concatenated(tensors: list[Any]) -> Any:
    if isinstance(tensors[0], tf.SparseTensor):
        return tf.sparse.concat(0, tensors)
    return tf.concat(tensors, axis=0)


def shard_of_replica(examples: Any, sizes: Any) -> Any:
    """Cut the examples of the replica that calls it, where replicas have so many each."""
    context = tf.distribute.get_replica_context()
    shard = _workers.piece_of(context.strategy, context.replica_id_in_sync_group)
    start = tf.reduce_sum(tf.where(tf.range(tf.shape(sizes)[0]) < shard, sizes, 0))
    stop = start + sizes[shard]
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _workers.sliced(leaf, start, stop), examples
    )


def iterator_of(strategy: Any, batches: list[Any], spec: Any) -> Any:
    """Iterate over distributed batches that were taken from an iterator, as if they were not.

    Args:
        strategy: The strategy.
        batches: What `next` of the iterator gave.
        spec: The specification of the iterator's elements: with the same one a step is not traced
            again.
    """
    local = len(strategy.extended.worker_devices)

    def shard(batch: Any, index: int) -> Any:
        return tf.nest.map_structure(
            lambda leaf: strategy.experimental_local_results(leaf)[index], batch
        )

    shards = [shard(batch, index) for batch in batches for index in range(local)]
    datasets = [tf.data.Dataset.from_tensors(part) for part in shards]
    first = next(part for part in tf.nest.flatten(spec) if hasattr(part, "shape") or part)
    first = getattr(first, "_value_specs", (first,))[0]
    if first.shape.rank and first.shape[0] is None:
        nothing = tf.nest.map_structure(lambda leaf: _workers.sliced(leaf, 0, 0), shards[0])
        datasets.append(tf.data.Dataset.from_tensors(nothing))  # so that any size may come
    joined = functools.reduce(lambda one, other: one.concatenate(other), datasets)
    joined = joined.take(len(shards))
    return iter(strategy.distribute_datasets_from_function(lambda _: joined))


def of_any_length(tensor: Any) -> Any:
    """Return the specification of a tensor with any number of examples."""
    spec = tf.type_spec_from_value(tensor)
    shape = [None, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)
