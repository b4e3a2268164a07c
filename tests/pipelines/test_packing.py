import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines

START, END, PAD = 2, 3, 0
documents_of_tokens = st.lists(st.lists(st.integers(5, 99), max_size=12), min_size=1, max_size=9)


def vectors(rows, dtype=tf.int32):
    return tf.data.Dataset.from_generator(
        lambda: rows, output_signature=tf.TensorSpec([None], dtype)
    )


def packed(documents, length):
    stage = pipelines.pack_tokens(length, start=START, end=END, pad=PAD)
    return [row.numpy() for row in vectors(documents).apply(stage)]


@pytest.mark.slow
@settings(max_examples=20)
@given(documents=documents_of_tokens, length=st.integers(3, 10))
def test_packed_rows_hold_every_token_in_order_and_only_the_last_has_padding(documents, length):
    rows = packed(documents, length)
    stream = []
    for row in rows:
        assert row.shape == (length,)
        assert row.dtype == np.int32
        assert row[0] == START
        used = len(row) - int((row == PAD).sum())
        assert row[used - 1] == END
        assert used == length or row is rows[-1]
        stream += row[1 : used - 1].tolist()
    wanted = [token for document in documents for token in [*document, END]]
    assert stream == wanted[:-1]


@pytest.mark.slow
@settings(max_examples=5)
@given(documents=documents_of_tokens, length=st.integers(3, 10))
def test_packing_is_the_same_wherever_documents_are_read_in_batches(documents, length):
    once = packed(documents * 60, length)  # more than are packed at a time
    again = packed(documents * 60, length)
    np.testing.assert_array_equal(once, again)
    tokens = 60 * sum(len(document) + 1 for document in documents) - 1
    assert len(once) == -(-tokens // (length - 2))


@pytest.mark.slow
def test_nothing_gives_no_rows():
    assert packed([], 5) == []
    assert packed([[]], 5) == []


def test_documents_of_one_known_length_are_packed_too():
    documents = tf.data.Dataset.from_tensor_slices([[5, 6], [7, 8]])
    rows = documents.apply(pipelines.pack_tokens(5, start=START, end=END, pad=PAD))
    assert [row.numpy().tolist() for row in rows] == [[2, 5, 6, 3, 3], [2, 7, 8, 3, 0]]


@pytest.mark.slow
@settings(max_examples=15)
@given(
    rows=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=30),
    boundaries=st.sets(st.integers(1, 8), max_size=3),
    rows_each=st.integers(1, 3),
    replicas=st.integers(1, 3),
)
def test_buckets_hold_every_row_once_padded_to_the_first_that_fits(
    rows, boundaries, rows_each, replicas
):
    limits = [*sorted(boundaries), 9]
    size = rows_each * replicas
    stage = pipelines.bucket_by_length(
        limits, global_batch_size=size, replicas=replicas, drop_remainder=False
    )
    seen = []
    for batch in vectors(rows).apply(stage):
        assert batch.shape[1] in limits
        assert batch.shape[0] <= size
        for row in batch.numpy():
            ids = row[row != 0].tolist()
            assert len(row) == min(limit for limit in limits if limit >= len(ids))
            seen.append(ids)
    assert sorted(seen) == sorted(rows)


def test_short_buckets_are_left_out_unless_they_are_asked_for():
    rows = [[1], [1], [1], [2] * 4]
    stage = pipelines.bucket_by_length([2, 4], global_batch_size=2)
    assert [batch.shape for batch in vectors(rows).apply(stage)] == [(2, 2)]


def test_a_row_that_fits_no_bucket_says_so():
    batches = vectors([[1, 2, 3]]).apply(pipelines.bucket_by_length([2], global_batch_size=1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="longer than the last of `bound"):
        list(batches)


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (lambda: pipelines.pack_tokens(2, start=1, end=2, pad=0), "`length` must be.*length=2"),
        (lambda: pipelines.pack_tokens(8, start=-1, end=2, pad=0), "`start` must be.*start=-1"),
        (lambda: pipelines.bucket_by_length([], global_batch_size=2), "rising lengths"),
        (lambda: pipelines.bucket_by_length(8, global_batch_size=2), "rising.*boundaries=8"),
        (lambda: pipelines.bucket_by_length([4, 2], global_batch_size=2), r"rising.*\[4, 2\]"),
        (
            lambda: pipelines.bucket_by_length([4], global_batch_size=3, replicas=2),
            "multiple of `replicas`",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(stage, sentence):
    with pytest.raises(ValueError, match=sentence):
        stage()


@pytest.mark.parametrize(
    "stage",
    [
        pipelines.pack_tokens(8, start=1, end=2, pad=0),
        pipelines.bucket_by_length([8], global_batch_size=2),
    ],
)
@pytest.mark.parametrize("examples", [tf.constant(["text"]), tf.ones([3, 2])])
def test_what_is_not_token_ids_is_refused(stage, examples):
    with pytest.raises(ValueError, match="takes vectors of token ids.*tokenize"):
        tf.data.Dataset.from_tensor_slices(examples).apply(stage)
