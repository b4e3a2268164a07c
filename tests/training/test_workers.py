"""How rows are dealt out to processes, and how data that differ are noticed, without processes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import scaling
from kdpkit.training.tensorflow import _distribution

pytestmark = pytest.mark.tensorflow


class Replicas:
    """A strategy of several processes, as far as its numbers go."""

    def __init__(self, workers, local):
        self.num_replicas_in_sync = workers * local
        self.extended = type("Extended", (), {"worker_devices": ("CPU",) * local})()


def dealt(dataset, workers, local):
    """The shards of every batch, of each replica of each worker."""
    strategy = Replicas(workers, local)
    contexts = [
        tf.distribute.InputContext(workers, worker, workers * local) for worker in range(workers)
    ]
    given = [list(_distribution._shards(strategy, dataset, context)) for context in contexts]
    return [
        [given[worker][step * local + i] for worker in range(workers) for i in range(local)]
        for step in range(len(given[0]) // local)
    ]


@pytest.mark.slow
@settings(max_examples=30)
@given(
    num_examples=st.integers(1, 20),
    size=st.integers(1, 9),
    workers=st.integers(1, 4),
    local=st.integers(1, 3),
)
def test_every_example_of_a_batch_is_dealt_once_in_the_shards_of_split_batch(
    num_examples, size, workers, local
):
    dataset = tf.data.Dataset.range(num_examples).batch(size)
    steps = dealt(dataset, workers, local)
    assert len(steps) == len(dataset)
    for batch, shards in zip(dataset, steps, strict=True):
        in_order = [None] * (workers * local)
        for replica, shard in enumerate(shards):
            in_order[_distribution.shard_of(Replicas(workers, local), replica)] = shard.data.numpy()
        np.testing.assert_array_equal(np.concatenate(in_order), batch)
        sizes = scaling.split_batch(len(batch), workers * local)
        assert tuple(map(len, in_order)) == tuple(sizes)


def test_batches_of_any_structure_are_dealt():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    data = {"ragged": ragged, "sparse": sparse, "text": tf.constant(["a", "b", "c", "d"])}
    dataset = tf.data.Dataset.from_tensor_slices((data, [True, False, True, True])).batch(3)
    ((*first, second), _) = dealt(dataset.map(lambda x, y: (x, None, y)), 2, 1)
    (x, missing, y) = first[0].data
    assert x["ragged"].to_list() == [[1], [2, 3]]
    np.testing.assert_array_equal(tf.sparse.to_dense(x["sparse"]), [[0, 1], [2, 0]])
    assert missing is None
    assert y.numpy().tolist() == [True, False]
    assert second.data[0]["text"].numpy().tolist() == [b"c"]


def verdict(*fingerprints):
    """What replicas note that have these fingerprints; None stands for one without a batch."""
    rows = [
        tf.zeros([0, 2], tf.int64) if fingerprint is None else [[1, fingerprint]]
        for fingerprint in fingerprints
    ]
    sums = tf.add_n([_distribution.sums_to_compare(row) for row in rows])
    _distribution.compare(sums, len(fingerprints))
    noted, _distribution._differences[:] = [*_distribution._differences], []
    return noted


@settings(max_examples=20)
@given(st.lists(st.integers(0, _distribution._HASHES - 1), min_size=1, max_size=64))
def test_fingerprints_differ_just_if_one_does(fingerprints):
    assert verdict(*fingerprints) == ([] if len(set(fingerprints)) == 1 else ["content"])


def test_a_thousand_replicas_are_told_apart_and_an_early_end_is_noted():
    most = _distribution._HASHES - 1
    assert verdict(*[most] * 1000) == []
    assert verdict(*[most] * 999, most - 1) == ["content"]
    assert verdict(5, None, 5) == ["number"]
