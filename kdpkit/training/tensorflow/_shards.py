"""Shards of batches whose sizes are chosen: for verification, which cuts some examples twice."""

import functools
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit.training.tensorflow import _workers


def first_examples(strategy: tf.distribute.Strategy, batch: Any, count: int) -> Any:
    """Put the first examples of a distributed batch together; a smaller batch is repeated."""
    batch = _workers.opened(batch)[0]

    def first(leaf: Any) -> Any:
        shards = strategy.experimental_local_results(leaf)
        if shards[0] is None or isinstance(shards[0], tf.experimental.Optional):
            return None
        examples = _workers.concatenated([*shards])
        if _workers.spans_processes(strategy):
            examples = _of_all_processes(strategy, _workers.sliced(examples, 0, count))
        return _repeated(examples, count)

    return tf.nest.map_structure(first, batch)


def _of_all_processes(strategy: tf.distribute.Strategy, examples: Any) -> Any:
    """Put examples of all processes together, of whatever type: their bytes are sent."""
    parts = tf.nest.flatten(examples, expand_composites=True)
    texts = [tf.io.serialize_tensor(part).numpy() for part in parts]
    sizes = processes.gathered([len(text) for text in texts], strategy)
    words = -(-int(sizes.sum(axis=1).max()) // 8)
    own = np.frombuffer(b"".join(texts).ljust(8 * words, b"\0"), np.int64)
    return _workers.concatenated(
        [
            _unpacked(examples, data.tobytes(), ends)
            for data, ends in zip(
                processes.gathered(own, strategy), sizes.cumsum(axis=1), strict=True
            )
        ]
    )


def _unpacked(like: Any, data: bytes, ends: Any) -> Any:
    parts = tf.nest.flatten(like, expand_composites=True)
    positions = zip(parts, [0, *ends[:-1]], ends, strict=True)
    tensors = [tf.io.parse_tensor(data[start:end], part.dtype) for part, start, end in positions]
    return tf.nest.pack_sequence_as(like, tensors, expand_composites=True)


def check_same_lengths(strategy: tf.distribute.Strategy, batch: Any) -> None:
    """Raise an error if the parts of a batch have other numbers of examples."""
    batch = _workers.opened(batch)[0]
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    shards = [strategy.experimental_local_results(leaf) for leaf in leaves]
    shards = [of_leaf for of_leaf in shards if hasattr(of_leaf[0], "shape")]
    num_examples = [
        sum(int(_workers.examples_in(shard)) for shard in of_leaf) for of_leaf in shards
    ]
    if len(set(num_examples)) > 1:
        checks.fail(
            "The parts of a batch must have equally many examples, along their first axis.",
            shapes=[
                (n, *of_leaf[0].shape[1:]) for n, of_leaf in zip(num_examples, shards, strict=True)
            ],
            remedy="Put the axis of the examples first in each of them. What an example has "
            "several of goes behind it: 3 views of 4 examples are (4, 3, ...), and not (12, ...).",
        )


def check_every_replica_has_examples(strategy: tf.distribute.Strategy, batch: Any) -> None:
    """Raise an error, or write a line, for a step that fails on replicas without examples."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    counts = [_workers.examples_in(part) for part in strategy.experimental_local_results(first)]
    if 0 in map(int, counts):
        checks.fail(
            "The step fails on replicas that have no examples of a batch.",
            examples_of_replicas=[*map(int, counts)],
            remedy=f"Make batches of at least {strategy.num_replicas_in_sync} examples, the last "
            "one too (`drop_remainder=True`), or write the step for any number of examples.",
        )
    if processes.index() == 0:
        sys.stderr.write(
            "kdpkit: The step fails on replicas that have no examples of a batch, so every batch "
            f"must have at least {strategy.num_replicas_in_sync}.\n"
        )


def _repeated(tensor: Any, count: int) -> Any:
    while _workers.examples_in(tensor) < count:
        if not _workers.examples_in(tensor):
            break
        tensor = _workers.concatenated([tensor, tensor])
    return _workers.sliced(tensor, 0, count)


def shard_of_replica(examples: Any, sizes: Any) -> Any:
    """Cut the examples of the replica that calls it, where replicas have so many each."""
    context = tf.distribute.get_replica_context()
    shard = _workers.shard_of(context.strategy, context.replica_id_in_sync_group)
    start = tf.reduce_sum(tf.where(tf.range(tf.shape(sizes)[0]) < shard, sizes, 0))
    stop = start + sizes[shard]
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else _workers.sliced(leaf, start, stop), examples
    )


def iterator_of(strategy: tf.distribute.Strategy, batches: list[Any], spec: Any) -> Any:
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
