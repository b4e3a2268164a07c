"""The global batches of a dataset, which every process reads, and compares with the others'.

With several processes TensorFlow's own sharding of a dataset depends on its source and on a policy.
A shard by files gives batches of other examples than one device has; a shard of the data splits
batches at other positions where they are uneven; and with none every process trains on all of it.
Here every process reads the complete dataset, so that a batch has exactly the examples that it has
on one device. That all read the same batches is compared in every step.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit._internal.datasets import joining, with_private_batches
from kdpkit.training.tensorflow._collectives import Channel, total

_POLICY = tf.data.experimental.AutoShardPolicy
_HASHES = 1 << 20  # few enough that the sum of the squares of 1000 fits in 60 bits
_SAME = (
    "Build the same dataset in every process, in the same order: shuffle with a seed, as "
    "`kdpkit.pipelines.train_pipeline` does, or call `keras.utils.set_random_seed` first."
)
_ENDED = (
    "The number of batches must be the same in all processes, and one has come to its end before "
    "the others."
)
_DIFFERENT = (
    "All processes must read the same batches, of which each takes its examples, and they read "
    "different ones."
)
_reported: set[str] = set()


class Read(NamedTuple):
    """A global batch as one of several processes has read it.

    Args:
        batch: Its examples.
        fingerprint: `[[1, hash]]` with a hash of the batch; empty at the end of the data.
    """

    batch: Any
    fingerprint: Any


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return is_multi_worker and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def global_batches(
    strategy: tf.distribute.Strategy, dataset: Any, name: str = "the dataset"
) -> Any:
    """Return what gives the global batches of a dataset, in each process.

    Raises:
        ValueError: In all processes, if its length or its kind of batches is not the same in all,
            or its auto-shard policy is OFF, HINT or FILE.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    dataset = with_private_batches(dataset)
    if not spans_processes(strategy):
        return dataset
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (_POLICY.AUTO, _POLICY.DATA):
        checks.fail(
            "With this policy every process would train on a part of its own pipeline, in other "
            "batches than one device's.",
            auto_shard_policy=policy.name,
            remedy="Pass the same dataset in all processes, without an auto-shard policy.",
        )
    spec = int(_hash(repr(dataset.element_spec), 1 << 60))
    numbers = {"The types and shapes": spec, "The number": int(dataset.cardinality())}
    for what, number in numbers.items():
        compared = f"{what} of the batches of {name}"
        processes.require_equal(compared, [number], remedy=_SAME, strategy=strategy)
    _report_once(
        f"Each of the {processes.count()} processes reads all of the data and takes its examples "
        "of every batch."
    )
    join, num_devices = joining(dataset.element_spec), len(strategy.extended.worker_devices)

    def read_for_each_device(*parts: Any) -> Any:
        batch = join(parts)
        read = Read(batch, _fingerprint(batch))
        return tf.data.Dataset.from_tensors(read).repeat(num_devices)

    reads = dataset.flat_map(tf.autograph.experimental.do_not_convert(read_for_each_device))
    return strategy.distribute_datasets_from_function(lambda _: reads)


def _report_once(line: str) -> None:
    if line not in _reported and processes.index() == 0:
        sys.stderr.write(f"kdpkit: {line}\n")
    _reported.add(line)


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
    tensor: Any = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0] if tensor.shape.rank != 0 else tf.constant(1)


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


def opened(mesh: Any, data: Any) -> Any:
    """Return the global batch; of several processes, if it is the same in all of them."""

    def of_first_device(leaf: Any) -> Any:
        if isinstance(leaf, tf.distribute.DistributedValues):
            return mesh.strategy.experimental_local_results(leaf)[0]
        return leaf

    data = tf.nest.map_structure(of_first_device, data)
    if not isinstance(data, Read):
        return data
    present, value = tf.unstack(tf.reduce_sum(tf.cast(data.fingerprint, tf.int64), axis=0))
    sums = total(mesh, tf.stack([present, value, value * value]), Channel(0))
    present, value, squares = tf.unstack(sums)
    # R numbers are equal exactly if R times the sum of their squares is the square of their sum.
    count = mesh.num_processes
    assertions = [
        tf.debugging.Assert(present == count, [_ENDED]),
        tf.debugging.Assert((present != count) | (count * squares == value * value), [_DIFFERENT]),
    ]
    with tf.control_dependencies(assertions):
        return tf.nest.map_structure(tf.identity, data.batch, expand_composites=True)


@contextlib.contextmanager
def explaining_differences() -> Iterator[None]:
    """Raise a sentence, in all processes, where they have read different batches."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for sentence in (_ENDED, _DIFFERENT):
            if sentence in str(error):
                checks.fail(sentence, remedy=_SAME)
        raise
