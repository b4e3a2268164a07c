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


def test_what_cannot_be_packed_gets_one_sentence():
    with pytest.raises(ValueError, match="`length` must be.*length=2"):
        pipelines.pack_tokens(2, start=1, end=2, pad=0)
    with pytest.raises(ValueError, match="`start` must be.*start=-1"):
        pipelines.pack_tokens(8, start=-1, end=2, pad=0)
    texts = tf.data.Dataset.from_tensor_slices(["text"])
    with pytest.raises(ValueError, match="takes vectors of token ids.*tokenize"):
        texts.apply(pipelines.pack_tokens(8, start=1, end=2, pad=0))
