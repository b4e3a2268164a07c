"""The global batches of a dataset, which every process reads and compares with the others'.

A global batch is one batch of `fit`, which all devices (replicas) share: each trains on its part,
some of the examples. A process is one of the programs that train together, each on its own devices.

With several processes TensorFlow's own distribution would give each process another shard of the
dataset. Batches would then differ from those of one device: a shard of the files has other examples
in its batches, and a shard of the examples has other ones if a batch is not a multiple of the
processes. So here the dataset is not sharded: every process reads all of it and trains on its part
of each global batch, and each step checks that all processes have read the same batch.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from kdpkit._internal import checks, processes
from kdpkit._internal.datasets import joining, with_private_batches
from kdpkit.training.tensorflow._keras_internals import next_turn
from kdpkit.training.tensorflow.partition._exchanges import summed

_POLICY = tf.data.experimental.AutoShardPolicy
# With 1000 processes `checked_batch` computes at most 1000 * 1000 * 2**40: an int64 holds that.
_NUM_HASHES = 1 << 20
_SAME = (
    "Build the same dataset in every process, in the same order: shuffle with a seed, as "
    "`kdpkit.pipelines.train_pipeline` does, or call `keras.utils.set_random_seed` first."
)
_ENDED = (
    "The number of batches must be the same in all processes, but one has come to its end before "
    "the others."
)
_DIFFERENT = "All processes must read the same batches, but they have read different ones."
OTHER_LENGTHS = "The tensors of a batch have different numbers of examples."
_REMEDIES = {
    _ENDED: _SAME,
    _DIFFERENT: _SAME,
    OTHER_LENGTHS: "Give those that have other numbers of examples a known length: batch them with "
    "`drop_remainder=True`.",
}
_reported: set[str] = set()


class FingerprintedBatch(NamedTuple):
    """A global batch that one of several processes has read, before it is compared.

    The fingerprint is `[[1, hash]]` with a hash of the batch. It has no row if the data have ended
    in this process and not in all: TensorFlow then passes empty tensors.
    """

    batch: Any
    fingerprint: Any


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return is_multi_worker and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def global_batches(
    strategy: tf.distribute.Strategy, dataset: Any, name: str = "the dataset"
) -> Any:
    """Return an iterable over the global batches of a dataset, all of them in each process.

    It raises in all if they differ in the number of batches, or in their types and shapes.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    # TensorFlow's operations may write into the user's arrays, so they get copies.
    dataset = with_private_batches(dataset)
    if not spans_processes(strategy):
        return dataset
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (_POLICY.AUTO, _POLICY.DATA):
        checks.fail(
            "Every process reads the complete dataset and trains on its part of each batch, so a "
            "policy of sharding has no effect.",
            auto_shard_policy=policy.name,
            remedy="Pass the same dataset in all processes, without sharding and without a policy.",
        )
    types_and_shapes = int(_hash(repr(dataset.element_spec), 1 << 60))
    numbers = {"The types and shapes": types_and_shapes, "The number": int(dataset.cardinality())}
    for property_name, number in numbers.items():
        subject = f"{property_name} of the batches of {name}"
        processes.require_equal(subject, [number], remedy=_SAME, strategy=strategy)
    line = f"kdpkit: Each of the {processes.count()} processes reads all of the data, and takes "
    if line not in _reported and processes.index() == 0:
        sys.stderr.write(f"{line}its part of every batch.\n")
    _reported.add(line)
    # tf.data passes the tensors of a tuple, such as `(x, y)`, as separate arguments.
    join, num_devices = joining(dataset.element_spec), len(strategy.extended.worker_devices)

    def batch_for_each_device(*arguments: Any) -> Any:
        element = fingerprinted(join(arguments))
        # The strategy takes one element for each device of this process, here the same one.
        return tf.data.Dataset.from_tensors(element).repeat(num_devices)

    # AutoGraph has nothing to convert here: the function has no `if` or loop.
    batches = dataset.flat_map(tf.autograph.experimental.do_not_convert(batch_for_each_device))
    # Unlike `experimental_distribute_dataset` it shards nothing: each process gets its dataset.
    return strategy.distribute_datasets_from_function(lambda _: batches)


def examples_in_batch(batch: Any) -> Any:
    """Count the examples of a batch, as an int32: those of its first tensor."""
    tensor: Any = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0] if tensor.shape.rank != 0 else tf.constant(1)


def fingerprinted(batch: Any) -> FingerprintedBatch:
    """Return a batch with its fingerprint, a hash that another batch is very unlikely to have."""
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    hashes = tf.strings.join(
        [tf.strings.as_string(_hash(tf.io.serialize_tensor(leaf), 1 << 60)) for leaf in leaves],
        separator=" ",
    )
    row = [tf.constant(1, tf.int64), _hash(hashes, _NUM_HASHES)]
    return FingerprintedBatch(batch, [row])


def _hash(text: Any, buckets: int) -> Any:
    return tf.strings.to_hash_bucket_fast(text, buckets)


def checked_batch(mesh: Any, data: Any) -> Any:
    """Return the global batch of a step, after a check that all processes have read the same.

    The mesh is all devices that train together (`_step.Mesh`). If the data end in all processes at
    once, TensorFlow itself ends the epoch, and there is no step.
    """

    def on_first_device(leaf: Any) -> Any:
        if isinstance(leaf, tf.distribute.DistributedValues):
            return mesh.strategy.experimental_local_results(leaf)[0]
        return leaf

    data = tf.nest.map_structure(on_first_device, data)
    if not isinstance(data, FingerprintedBatch):  # There is only one process.
        return data
    # The sum of the rows is `[1, hash]`, or `[0, 0]` if there is no row.
    num_rows, hash_here = tf.unstack(tf.reduce_sum(tf.cast(data.fingerprint, tf.int64), axis=0))
    # What processes exchange in a step is numbered: 0 is this.
    numbers = tf.stack([num_rows, hash_here, hash_here * hash_here])
    sums = summed(mesh, numbers, 0, next_turn(mesh, "batch"))
    num_batches, sum_of_hashes, sum_of_squares = tf.unstack(sums)
    all_have_a_batch = num_batches == mesh.num_processes
    # N numbers are equal exactly if N times the sum of their squares is the square of their sum.
    are_equal = mesh.num_processes * sum_of_squares == sum_of_hashes * sum_of_hashes
    assertions = [
        tf.debugging.Assert(all_have_a_batch, [_ENDED]),
        # This one passes if the first fails, so that the error has one of the two sentences.
        tf.debugging.Assert(~all_have_a_batch | are_equal, [_DIFFERENT]),
    ]
    # The step computes with copies of the tensors, which are not made before the checks pass.
    with tf.control_dependencies(assertions):
        return tf.nest.map_structure(tf.identity, data.batch, expand_composites=True)


@contextlib.contextmanager
def explaining_differences() -> Iterator[None]:
    """Raise an `InputError` with the fix where one of a step's assertions fails."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for problem, remedy in _REMEDIES.items():
            if problem in str(error):
                checks.fail(problem, remedy=remedy)
        raise
