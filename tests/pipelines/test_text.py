import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{index}" for index in range(40)]
TOKENIZER = keras_hub.models.BertTokenizer([*SPECIAL, *WORDS], lowercase=True)
PAD, UNK, CLS, SEP, MASK = range(5)
ENDS = {"start": CLS, "end": SEP, "pad": PAD}

NEEDS_TEXT = pytest.mark.needs(reason="KerasHub reads text with it", **{"tensorflow-text": "2.20"})

lines = st.lists(st.lists(st.sampled_from(WORDS), max_size=15).map(" ".join), min_size=1)


@NEEDS_TEXT
@settings(max_examples=5)
@given(lines=lines, length=st.integers(3, 9))
def test_sequences_hold_every_token_of_every_line_in_order(lines, length):
    source = tf.data.Dataset.from_tensor_slices(lines)
    stage = pipelines.tokenize(TOKENIZER, sequence_length=length)
    sequences = [sequence.numpy() for sequence in source.apply(stage)]
    seen = []
    for sequence in sequences:
        assert sequence.shape == (length,)
        assert sequence.dtype == np.int32
        body = sequence[sequence != PAD]
        assert body[0] == CLS
        assert body[-1] == SEP
        assert len(body) > 2
        seen += body[1:-1].tolist()
    assert seen == [len(SPECIAL) + int(word[1:]) for line in lines for word in line.split()]
    assert len(sequences) == sum(-(-len(line.split()) // (length - 2)) for line in lines)


def some_sequences(count, length, seed=0):
    """Return sequences of random ordinary tokens, of random length, with their special tokens."""
    random = np.random.default_rng(seed)
    sequences = np.zeros((count, length), "int32")
    for sequence in sequences:
        size = random.integers(1, length - 1)
        sequence[: size + 2] = [CLS, *random.integers(5, 45, size), SEP]
    return tf.constant(sequences)


@settings(max_examples=20)
@given(
    count=st.integers(1, 6),
    length=st.integers(3, 20),
    rate=st.floats(0.05, 1.0),
    seed=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_masks_cover_the_asked_fraction_of_ordinary_tokens(count, length, rate, seed):
    tokens = some_sequences(count, length)
    mask = pipelines.mask_tokens(TOKENIZER, rate=rate)
    features, labels, weights = mask(tokens, seed)
    for one, again in zip(
        tf.nest.flatten((features, weights)), tf.nest.flatten(mask(tokens, seed)[::2]), strict=True
    ):
        np.testing.assert_array_equal(one, again)
    originals, masked = tokens.numpy(), features["token_ids"].numpy()
    for index in range(count):
        chosen = weights[index].numpy() > 0
        positions = features["mask_positions"][index].numpy()[chosen]
        ordinary = int((originals[index] >= len(SPECIAL)).sum())
        room = labels.shape[1]
        assert chosen.sum() == min(room, np.ceil(np.float32(rate) * np.float32(ordinary)))
        assert len(set(positions)) == len(positions)
        assert (originals[index][positions] >= len(SPECIAL)).all()
        np.testing.assert_array_equal(labels[index].numpy()[chosen], originals[index][positions])
        untouched = np.setdiff1d(np.arange(length), positions)
        np.testing.assert_array_equal(masked[index][untouched], originals[index][untouched])
    assert features["padding_mask"].dtype == tf.int32
    np.testing.assert_array_equal(features["padding_mask"], originals != PAD)
    np.testing.assert_allclose(np.sum(weights), tf.size(weights), rtol=1e-5)


def test_of_the_masked_tokens_eight_in_ten_become_mask_and_one_in_ten_another():
    tokens = some_sequences(600, 40)
    features, labels, weights = pipelines.mask_tokens(TOKENIZER)(tokens, (3, 4))
    chosen = weights.numpy() > 0
    become = np.take_along_axis(
        features["token_ids"].numpy(), features["mask_positions"].numpy(), axis=1
    )[chosen]
    same = become == labels.numpy()[chosen]
    count = chosen.sum()
    assert (become == MASK).mean() == pytest.approx(0.8, abs=4 / np.sqrt(count))
    assert same.mean() == pytest.approx(0.1, abs=4 / np.sqrt(count))


def test_a_batch_without_a_token_to_predict_has_weight_zero():
    tokens = tf.constant([[CLS, SEP, PAD, PAD]] * 2)
    _, _, weights = pipelines.mask_tokens(TOKENIZER)(tokens, (0, 1))
    np.testing.assert_array_equal(weights, np.zeros((2, 1)))


def test_validation_masks_depend_on_the_sequence_alone():
    mask, tokens = pipelines.mask_tokens(TOKENIZER, rate=0.5), some_sequences(5, 30)
    together = mask(tokens)
    for index in range(5):
        alone = mask(tokens[index])
        for batch, part in zip(tf.nest.flatten(together), tf.nest.flatten(alone), strict=True):
            np.testing.assert_array_equal(batch[index], part)
    assert set(np.unique(together[2])) == {0.0, 1.0}


# Packing.


def packed(documents, length):
    spec = tf.TensorSpec([None], tf.int32)
    vectors = tf.data.Dataset.from_generator(lambda: documents, output_signature=spec)
    return [sequence.numpy() for sequence in vectors.apply(pipelines.pack_tokens(length, **ENDS))]


@settings(max_examples=4)
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
        assert sequence[0] == CLS
        used = len(sequence) - int((sequence == PAD).sum())
        assert sequence[used - 1] == SEP
        assert used == length or sequence is sequences[-1]
        stream += sequence[1 : used - 1].tolist()
    wanted = [token for document in documents * times for token in [*document, SEP]][:-1]
    assert stream == wanted
    assert len(sequences) == -(-len(wanted) // (length - 2))


# Bad input.


LINES = tf.data.Dataset.from_tensor_slices(["one", "two"])


def padding_tokenizer():
    return keras_hub.models.BertTokenizer(TOKENIZER.get_vocabulary(), sequence_length=5)


def tokenized(lines):
    return lines.apply(pipelines.tokenize(TOKENIZER, sequence_length=4))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: pipelines.mask_tokens(TOKENIZER, rate=0), "`rate` must be above 0 and at most 1"),
        (lambda: pipelines.mask_tokens(TOKENIZER)(tf.ragged.constant([[6], [6, 7]])), "one static"),
        (lambda: pipelines.tokenize(TOKENIZER, sequence_length=2), "`sequence_length` must be"),
        (lambda: pipelines.tokenize(padding_tokenizer()), "a `sequence_length` of its own"),
        (lambda: tokenized(LINES.batch(2)), "lines of text one by one"),
        (lambda: pipelines.pack_tokens(2, **ENDS), "`length` must be.*length=2"),
        (lambda: pipelines.pack_tokens(8, **ENDS | {"start": -1}), "`start` must be.*start=-1"),
        (lambda: LINES.apply(pipelines.pack_tokens(8, **ENDS)), "vectors of token ids.*tokenize"),
    ],
)
def test_bad_arguments_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
