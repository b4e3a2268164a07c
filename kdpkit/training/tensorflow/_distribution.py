"""How global batches are divided among the replicas, of one process and of several.

In one process TensorFlow divides dense batches, and this file those that it cannot divide. With
several, TensorFlow's own sharding of a dataset depends on its source and on a policy. A shard by
files gives batches of other examples than one device has; a shard of the data splits batches at
other positions where they are uneven; and with none every process trains on all of it. Here every
process reads the complete dataset, and each replica takes its shard of every batch, so that a batch
has exactly the examples that it has on one device. What that needs, that all processes read the
same batches, is compared in every step.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit._internal.datasets import joining, with_private_batches

_POLICY = tf.data.experimental.AutoShardPolicy
_HASHES = 1 << 20  # few enough that the sum of the squares of 1000 fits in 60 bits
_SAME = (
    "Build the same dataset in every process, in the same order: shuffle with a seed, as "
    "`kdpkit.pipelines.train_pipeline` does, or call `keras.utils.set_random_seed` first."
)
_reported: set[str] = set()
_differences: list[str] = []  # that the current step has found


class Shard(NamedTuple):
    """What one replica gets of a global batch.

    Args:
        data: Its examples.
        fingerprint: Whether there was a batch, and a number computed from all of it: `[[1, hash]]`,
            or no example where the process has come to the end of its data.
    """

    data: Any
    fingerprint: Any


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return is_multi_worker and strategy.num_replicas_in_sync > len(_local_devices(strategy))


def shard_of(strategy: tf.distribute.Strategy, replica: int) -> int:
    """Return the number of the shard of a batch that a replica takes.

    With several processes the shards are dealt out in turn, because that is the order in which
    Keras puts predictions together again.
    """
    local = len(_local_devices(strategy))
    worker, index = replica // local, replica % local  # `replica` may be a tensor
    return index * (strategy.num_replicas_in_sync // local) + worker


def _local_devices(strategy: tf.distribute.Strategy) -> Sequence[str]:
    return strategy.extended.worker_devices


# The data.


def distribute(strategy: tf.distribute.Strategy, dataset: Any, name: str = "the dataset") -> Any:
    """Spread the batches of a dataset over the replicas; over several processes, their examples.

    Args:
        strategy: The strategy.
        dataset: The same global batches in every process.
        name: What messages call it.

    Raises:
        ValueError: In all processes, if its length or its kind of batches is not the same in all,
            or its auto-shard policy is OFF or HINT.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return _stock_distribute(strategy, dataset)
    dataset = with_private_batches(dataset)
    dealt_out = functools.partial(
        strategy.distribute_datasets_from_function, functools.partial(_shards, strategy, dataset)
    )
    if not spans_processes(strategy):
        kinds = (tf.SparseTensorSpec, tf.RaggedTensorSpec)
        is_packed = any(isinstance(spec, kinds) for spec in tf.nest.flatten(dataset.element_spec))
        if strategy.num_replicas_in_sync == 1 or not is_packed:
            return _stock_distribute(strategy, dataset)
        return dealt_out()  # docs/upstream/tensorflow_cuts_no_sparse_examples.md
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICY.FILE:
        _report(
            f"Each of the {processes.count()} processes reads files of its own, as the dataset's "
            "policy FILE asks: every example counts once, in other batches than one device's."
        )
        return _stock_distribute(strategy, dataset)
    if policy not in (_POLICY.AUTO, _POLICY.DATA):
        checks.fail(
            "With this policy every process would train on a part of its own pipeline, and nobody "
            "would know on which examples.",
            auto_shard_policy=policy.name,
            remedy='Pass the same dataset in all processes with `auto_shard("data")`, which deals '
            "its examples out, or what `strategy.distribute_datasets_from_function` makes.",
        )
    kind = int(_hash(repr(dataset.element_spec), 1 << 60))
    numbers = {"The types and shapes": kind, "The number": int(dataset.cardinality())}
    for what, number in numbers.items():
        name_of = f"{what} of the batches of {name}"
        processes.require_equal(name_of, [number], remedy=_SAME, strategy=strategy)
    _report(
        f"Each of the {processes.count()} processes reads all of the data and takes its examples "
        "of every batch."
    )
    return dealt_out()


def _stock_distribute(strategy: tf.distribute.Strategy, dataset: Any) -> Any:
    # The class's own, since during `fit` the instance's is ours.
    return type(strategy).experimental_distribute_dataset(strategy, dataset)


def _report(line: str) -> None:
    """Report once, in the first process, how the data are spread."""
    if line not in _reported and processes.index() == 0:
        sys.stderr.write(f"kdpkit: {line}\n")
    _reported.add(line)


def _shards(strategy: tf.distribute.Strategy, dataset: Any, context: Any) -> Any:
    """Return the shards that the replicas of this process take, one after the other."""
    replicas = context.num_replicas_in_sync
    local = replicas // context.num_input_pipelines
    first = context.input_pipeline_id * local
    joined_parts = joining(dataset.element_spec)

    def shard(batch: Any, fingerprint: Any, replica: Any) -> Shard:
        return Shard(_cut(batch, shard_of(strategy, replica), replicas), fingerprint)

    def only_shard(*parts: Any) -> Shard:
        batch = joined_parts(parts)
        return shard(batch, _fingerprint(batch), first)

    def several_shards(*parts: Any) -> Any:
        batch = joined_parts(parts)
        fingerprint = _fingerprint(batch)
        own = [
            tf.data.Dataset.from_tensors(shard(batch, fingerprint, first + i)) for i in range(local)
        ]
        joined = own[0]
        for following in own[1:]:
            joined = joined.concatenate(following)
        return joined

    as_it_is = tf.autograph.experimental.do_not_convert
    if local == 1:
        return dataset.map(as_it_is(only_shard))
    return dataset.flat_map(as_it_is(several_shards))


def _cut(batch: Any, index: int, replicas: int) -> Any:
    """Return a shard of a batch, as `kdpkit.scaling.split_batch` does."""
    num_examples = examples_in_batch(batch)
    size = -(-num_examples // replicas)
    start = tf.minimum(index * size, num_examples)
    stop = tf.minimum(start + size, num_examples)
    return tf.nest.map_structure(lambda x: None if x is None else sliced(x, start, stop), batch)


def sliced(tensor: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    """Return some examples of a dense, ragged or sparse tensor."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    rest = tf.cast(tf.shape(tensor)[1:], tf.int64)
    first, size = (tf.cast(number, tf.int64) for number in (start, stop - start))
    starts, sizes = tf.concat([[first], tf.zeros_like(rest)], 0), tf.concat([[size], rest], 0)
    return tf.sparse.slice(tensor, starts, sizes)


def examples_in_batch(batch: Any) -> Any:
    """Count the examples of a batch, as an int32: those of its first tensor."""
    return examples_in(next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None))


def examples_in(tensor: Any) -> Any:
    """Count the examples of a dense, ragged or sparse tensor, as an int32."""
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0] if tensor.shape.rank != 0 else tf.constant(1)


# Agreement, in every step.


def _fingerprint(batch: Any) -> Any:
    """Return a number that other batches, in all likelihood, do not have."""
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    hashes = tf.strings.join(
        [tf.strings.as_string(_hash(tf.io.serialize_tensor(leaf), 1 << 60)) for leaf in leaves],
        separator=" ",
    )
    return [[tf.constant(1, tf.int64), _hash(hashes, _HASHES)]]


def _hash(text: Any, buckets: int) -> Any:
    return tf.strings.to_hash_bucket_fast(text, buckets)


def opened(data: Any) -> tuple[Any, Any]:
    """Return a replica's examples, and the fingerprint of the batch if they have one."""
    return (data.data, data.fingerprint) if isinstance(data, Shard) else (data, None)


def sums_to_compare(fingerprint: Any) -> Any:
    """Return three numbers to be summed over replicas: batches, their hashes, and squares."""
    present, value = tf.unstack(tf.reduce_sum(tf.cast(fingerprint, tf.int64), axis=0))
    return tf.stack([present, value, value * value])


def compare(sums: Any, replicas: int) -> Any:
    """Note, on every replica alike, if the batches that the replicas split were not the same.

    R numbers are equal just if R times the sum of their squares is the square of their sum.
    """
    present, total, squares = tf.unstack(sums)
    has_ended = present != replicas
    differs = replicas * squares != total * total

    def note() -> Any:
        return tf.numpy_function(_note, [has_ended], tf.int32)

    return tf.cond(has_ended | differs, note, lambda: tf.constant(0))


def _note(has_ended: Any) -> Any:
    _differences.append("number" if has_ended else "content")
    return np.int32(0)


def reject_differences() -> None:
    """Reject, in all processes, batches that the last step found to differ between them."""
    if not _differences:
        return
    what = _differences[0]
    _differences.clear()
    if what == "number":
        checks.fail(
            "The number of batches must be the same in all processes, and one has come to its end "
            "before the others.",
            remedy=_SAME,
        )
    checks.fail(
        "All processes must read the same batches, of which each takes its examples, and they read "
        "different ones.",
        remedy=_SAME,
    )
