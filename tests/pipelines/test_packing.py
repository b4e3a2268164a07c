import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines

START, END, PAD = 2, 3, 0


def vectors(sequences):
    return tf.data.Dataset.from_generator(
        lambda: sequences, output_signature=tf.TensorSpec([None], tf.int32)
    )


def packed(documents, length):
    stage = pipelines.pack_tokens(length, start=START, end=END, pad=PAD)
    return [sequence.numpy() for sequence in vectors(documents).apply(stage)]


@settings(max_examples=12)
@given(
    documents=st.lists(st.lists(st.integers(5, 99), max_size=12), max_size=9),
    times=st.sampled_from([1, 60]),  # more than are packed at a time
    length=st.integers(3, 10),
)
def test_packed_sequences_hold_every_token_in_order_and_only_the_last_has_padding(
    documents, times, length
):
    sequences = packed(documents * times, length)
    stream = []
    for sequence in sequences:
        assert sequence.shape == (length,)
        assert sequence.dtype == np.int32
        assert sequence[0] == START
        used = len(sequence) - int((sequence == PAD).sum())
        assert sequence[used - 1] == END
        assert used == length or sequence is sequences[-1]
        stream += sequence[1 : used - 1].tolist()
    wanted = [token for document in documents * times for token in [*document, END]][:-1]
    assert stream == wanted
    assert len(sequences) == -(-len(wanted) // (length - 2))


def test_documents_of_one_known_length_are_packed_too():
    documents = tf.data.Dataset.from_tensor_slices([[5, 6], [7, 8]])
    first, last = documents.apply(pipelines.pack_tokens(5, start=START, end=END, pad=PAD))
    assert first.numpy().tolist() == [2, 5, 6, 3, 3]
    assert last.numpy().tolist() == [2, 7, 8, 3, 0]


@settings(max_examples=10)
@given(
    sequences=st.lists(
        st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=30
    ),
    boundaries=st.sets(st.integers(1, 8), max_size=3),
    examples_each=st.integers(1, 3),
    replicas=st.integers(1, 3),
)
def test_buckets_hold_every_sequence_once_padded_to_the_first_that_fits(
    sequences, boundaries, examples_each, replicas
):
    limits = [*sorted(boundaries), 9]
    size = examples_each * replicas
    stage = pipelines.bucket_by_length(
        limits, global_batch_size=size, replicas=replicas, drop_remainder=False
    )
    seen, full = [], []
    for batch in vectors(sequences).apply(stage):
        full += [batch.numpy().tolist()] * (batch.shape[0] == size)
        assert batch.shape[1] in limits
        assert batch.shape[0] <= size
        for sequence in batch.numpy():
            ids = sequence[sequence != 0].tolist()
            assert len(sequence) == min(limit for limit in limits if limit >= len(ids))
            seen.append(ids)
    assert sorted(seen) == sorted(sequences)
    dropping = pipelines.bucket_by_length(limits, global_batch_size=size, replicas=replicas)
    assert [batch.numpy().tolist() for batch in vectors(sequences).apply(dropping)] == full


def test_a_sequence_that_fits_no_bucket_raises():
    batches = vectors([[1, 2, 3]]).apply(pipelines.bucket_by_length([2], global_batch_size=1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="longer than 2, the last of `bound"):
        list(batches)


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (lambda: pipelines.pack_tokens(2, start=1, end=2, pad=0), "`length` must be.*length=2"),
        (lambda: pipelines.pack_tokens(8, start=-1, end=2, pad=0), "`start` must be.*start=-1"),
        (lambda: pipelines.bucket_by_length([], global_batch_size=2), "rising lengths"),
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
def test_what_is_not_token_ids_raises(stage):
    examples = tf.constant(["text"])
    with pytest.raises(ValueError, match="takes vectors of token ids.*tokenize"):
        tf.data.Dataset.from_tensor_slices(examples).apply(stage)
