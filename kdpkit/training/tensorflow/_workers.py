"""Several processes of tf.distribute: each takes its rows of the same global batches.

TensorFlow's own sharding of a dataset depends on its source and on a policy. A shard by files gives
batches of other rows than one device has; a shard of the data cuts batches at other places where
they are uneven; and with none every process trains on all of it. Here every process reads the whole
dataset, and each replica takes its piece of every batch, so that a batch has exactly the rows that
it has on one device. What that needs, that all processes read the same batches, is compared in
every step.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kdpkit import _checks, _processes
from kdpkit._private_copies import joining, with_private_batches

_POLICY = tf.data.experimental.AutoShardPolicy
_HASHES = 1 << 20  # few enough that the sum of the squares of 1000 fits in 60 bits
_SAME = (
    "Build the same dataset in every process, in the same order: shuffle with a seed, as "
    "`kdpkit.pipelines.train_pipeline` does, or call `keras.utils.set_random_seed` first."
)
_told: set[str] = set()
_differences: list[str] = []  # that the step at hand has found


class Piece(NamedTuple):
    """What one replica gets of a global batch.

    Args:
        data: Its rows.
        seal: Whether there was a batch, and a number computed from the whole of it: `[[1, hash]]`,
            or no row where the process has come to the end of its data.
    """

    data: Any
    seal: Any


def spans_processes(strategy: Any) -> bool:
    """Tell whether the replicas of a strategy are in several processes."""
    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return is_multi_worker and strategy.num_replicas_in_sync > len(_local_devices(strategy))


def piece_of(strategy: Any, replica: int) -> int:
    """Give the number of the piece of a batch that a replica takes.

    With several processes the pieces are dealt out in turn, because that is the order in which
    Keras puts predictions together again.
    """
    local = len(_local_devices(strategy))
    worker, index = replica // local, replica % local  # `replica` may be a tensor
    return index * (strategy.num_replicas_in_sync // local) + worker


def _local_devices(strategy: Any) -> Sequence[str]:
    return strategy.extended.worker_devices


# The data.


def distribute(strategy: Any, dataset: Any, name: str = "the dataset") -> Any:
    """Spread the batches of a dataset over the replicas; over several processes, their rows.

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
    if not spans_processes(strategy):
        return _stock_distribute(strategy, dataset)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICY.FILE:
        _tell(
            f"Each of the {_processes.count()} processes reads files of its own, as the dataset's "
            "policy FILE asks: every row counts once, in other batches than one device's."
        )
        return _stock_distribute(strategy, dataset)
    if policy not in (_POLICY.AUTO, _POLICY.DATA):
        _checks.refuse(
            "With this policy every process would train on a part of its own pipeline, and nobody "
            "would know on which rows.",
            auto_shard_policy=policy.name,
            remedy='Give the same dataset in all processes with `auto_shard("data")`, which deals '
            "its rows out, or what `strategy.distribute_datasets_from_function` makes.",
        )
    kind = int(_hash(repr(dataset.element_spec), 1 << 60))
    for what, number in (
        ("The types and shapes", kind),
        ("The number", int(dataset.cardinality())),
    ):
        _processes.require_equal(
            f"{what} of the batches of {name}",
            [number],
            remedy=_SAME,
            strategy=strategy,
        )
    _tell(
        f"Each of the {_processes.count()} processes reads all of the data and takes its rows of "
        "every batch."
    )
    return strategy.distribute_datasets_from_function(
        lambda context: _pieces(strategy, dataset, context)
    )


def _stock_distribute(strategy: Any, dataset: Any) -> Any:
    # The class's own, since during `fit` the instance's is ours.
    return type(strategy).experimental_distribute_dataset(strategy, dataset)


def _tell(line: str) -> None:
    """Say once, in the first process, how the data are spread."""
    if line not in _told and _processes.index() == 0:
        sys.stderr.write(f"kdpkit: {line}\n")
    _told.add(line)


def _pieces(strategy: Any, dataset: Any, context: Any) -> Any:
    """Give the pieces that the replicas of this process take, one after the other."""
    replicas = context.num_replicas_in_sync
    local = replicas // context.num_input_pipelines
    first = context.input_pipeline_id * local
    whole = joining(dataset.element_spec)

    def piece(batch: Any, seal: Any, replica: Any) -> Piece:
        return Piece(_cut(batch, piece_of(strategy, replica), replicas), seal)

    def only_piece(*parts: Any) -> Piece:
        batch = whole(parts)
        return piece(batch, _seal(batch), first)

    def several_pieces(*parts: Any) -> Any:
        batch = whole(parts)
        seal = _seal(batch)
        own = [tf.data.Dataset.from_tensors(piece(batch, seal, first + i)) for i in range(local)]
        joined = own[0]
        for following in own[1:]:
            joined = joined.concatenate(following)
        return joined

    as_it_is = tf.autograph.experimental.do_not_convert
    if local == 1:
        return dataset.map(as_it_is(only_piece))
    return dataset.flat_map(as_it_is(several_pieces))


def _cut(batch: Any, index: int, replicas: int) -> Any:
    """Cut a piece of a batch out, as `kdpkit.scaling.split_batch` does."""
    rows = rows_of_batch(batch)
    size = -(-rows // replicas)
    start = tf.minimum(index * size, rows)
    stop = tf.minimum(start + size, rows)

    return tf.nest.map_structure(
        lambda part: None if part is None else sliced(part, start, stop), batch
    )


def sliced(tensor: Any, start: Any, stop: Any) -> Any:
    """Cut some rows out of a dense, ragged or sparse tensor."""
    if isinstance(tensor, tf.SparseTensor):
        return _cut_sparse(tensor, start, stop)
    return tensor[start:stop]


def rows_of_batch(batch: Any) -> Any:
    """Give the rows of a batch, as an int32: those of its first tensor."""
    return rows_of(next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None))


def static_rows_of_batch(batch: Any) -> int | None:
    """Return the rows of a batch where they are known while it is traced."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    return first.shape[0] if first.shape.rank else None


def rows_of(tensor: Any) -> Any:
    """Give the rows of a dense, ragged or sparse tensor, as an int32."""
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0]


def _cut_sparse(part: Any, start: Any, stop: Any) -> Any:
    rest = tf.cast(tf.shape(part)[1:], tf.int64)
    first, size = (tf.cast(number, tf.int64) for number in (start, stop - start))
    return tf.sparse.slice(
        part, tf.concat([[first], tf.zeros_like(rest)], 0), tf.concat([[size], rest], 0)
    )


# Agreement, in every step.


def _seal(batch: Any) -> Any:
    """Give a number that other batches, in all likelihood, do not have."""
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
    whole = tf.strings.join(
        [tf.strings.as_string(_hash(tf.io.serialize_tensor(leaf), 1 << 60)) for leaf in leaves],
        separator=" ",
    )
    return [[tf.constant(1, tf.int64), _hash(whole, _HASHES)]]


def _hash(text: Any, buckets: int) -> Any:
    return tf.strings.to_hash_bucket_fast(text, buckets)


def opened(data: Any) -> tuple[Any, Any]:
    """Give a replica's rows, and the seal of the batch if they have one."""
    return (data.data, data.seal) if isinstance(data, Piece) else (data, None)


def specs_of(spec: Any) -> Any:
    """Give the specification of the rows alone."""
    return opened(spec)[0]


def sums_to_compare(seal: Any) -> Any:
    """Give three numbers to be summed over the replicas: batches, their hashes, and the squares."""
    present, value = tf.unstack(tf.reduce_sum(tf.cast(seal, tf.int64), axis=0))
    return tf.stack([present, value, value * value])


def compare(sums: Any, replicas: int) -> Any:
    """Note, on every replica alike, if the batches that the replicas cut were not the same.

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


def refuse_differences() -> None:
    """Refuse, in all processes, batches that the last step found to differ between them."""
    if not _differences:
        return
    what = _differences[0]
    _differences.clear()
    if what == "number":
        _checks.refuse(
            "The number of batches must be the same in all processes, and one has come to its end "
            "before the others.",
            remedy=_SAME,
        )
    _checks.refuse(
        "All processes must read the same batches, of which each takes its rows, and they read "
        "different ones.",
        remedy=_SAME,
    )
