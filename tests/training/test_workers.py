"""How batches are split, and how data that differ between processes are noticed, without these."""

import types

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import scaling
from kdpkit.training.tensorflow import _global_batches
from kdpkit.training.tensorflow.partition._parts import parts_of

pytestmark = pytest.mark.tensorflow


@settings(max_examples=60)
@given(num_examples=st.integers(0, 40), parts=st.integers(1, 9))
def test_the_parts_of_a_batch_are_those_of_tf_distribute(num_examples, parts):
    found = parts_of(tf.constant(num_examples), parts, range(parts))
    assert tuple(map(int, found.unborrowed)) == scaling.split_batch(num_examples, parts)


def checked(monkeypatch, *fingerprints):
    """Check a batch in the first of some processes; None stands for one without a batch."""
    rows = [np.array([[1, f]] * (f is not None), "int64").reshape(-1, 2) for f in fingerprints]

    def summed(mesh, tensor, number, turn):  # noqa: ARG001  # as of all processes
        counts, sums = np.sum([row.sum(axis=0) for row in rows], axis=0)
        squares = sum(row[:, 1].sum() ** 2 for row in rows)
        return tf.constant([counts, sums, squares], tf.int64)

    monkeypatch.setattr(_global_batches, "summed", summed)
    monkeypatch.setattr(_global_batches, "next_turn", lambda mesh, purpose: 0)  # noqa: ARG005
    mesh = types.SimpleNamespace(num_processes=len(rows))
    with _global_batches.explaining_differences():
        return _global_batches.checked_batch(
            mesh, _global_batches.FingerprintedBatch(tf.constant([7]), rows[0])
        )


def test_the_same_batches_pass_the_check_and_others_are_one_sentence(monkeypatch):
    most = _global_batches._NUM_HASHES - 1
    assert checked(monkeypatch, 5, 5, 5).numpy().tolist() == [7]
    assert checked(monkeypatch, *[most] * 1000).numpy().tolist() == [7]
    for others in ([5, 6], [*[most] * 999, most - 1], [1, 3, 2]):
        with pytest.raises(ValueError, match="same batches.*set_random_seed"):
            checked(monkeypatch, *others)
    with pytest.raises(ValueError, match="number of batches"):
        checked(monkeypatch, 5, None, 5)


def test_fingerprints_of_batches_differ_by_any_part():
    ragged = tf.ragged.constant([[1], [2, 3]])
    batch = {"x": ragged, "y": tf.constant(["a", "b"]), "none": None}
    one = np.array(_global_batches.fingerprinted(batch).fingerprint)
    assert (one == np.array(_global_batches.fingerprinted(batch).fingerprint)).all()
    for change in ({"x": tf.ragged.constant([[1, 2], [3]])}, {"y": tf.constant(["a", "c"])}):
        assert (one != np.array(_global_batches.fingerprinted(batch | change).fingerprint)).any()
