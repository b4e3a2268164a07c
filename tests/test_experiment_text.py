"""The language recipes' sequences and masks: in NumPy as in `kdpkit.pipelines`."""

import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import errors, pipelines
from kdpkit.experiment import text

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

PAD, START, END, MASK, WORDS = 0, 2, 3, 4, 50
TOKENIZER = types.SimpleNamespace(
    special_token_ids=[PAD, 1, START, END, MASK],
    pad_token_id=PAD,
    mask_token_id=MASK,
    vocabulary_size=lambda: WORDS,
)
DOCUMENTS = st.lists(st.lists(st.integers(5, WORDS - 1), max_size=9), min_size=1, max_size=6)


@settings(max_examples=4)  # each builds a pipeline
@given(DOCUMENTS.filter(any), st.integers(3, 8))
def test_packed_sequences_are_those_of_the_pipeline(documents, length):
    ids = {"start": START, "end": END, "pad": PAD}
    arrays = [np.array(document, np.int32) for document in documents]
    stream = tf.data.Dataset.from_generator(
        lambda: iter(arrays), output_signature=tf.TensorSpec([None], tf.int32)
    )
    wanted = [*stream.apply(pipelines.pack_tokens(length, **ids)).as_numpy_iterator()]
    np.testing.assert_array_equal(text._packed(arrays, length, **ids), wanted)


def sequences(count, length, seed=0):
    """Return sequences of words, some with padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, WORDS, (count, length)).astype("int32")
    tokens[:, 0] = START
    for row, end in zip(tokens, random.integers(2, length, count), strict=True):
        row[end], row[end + 1 :] = END, PAD
    return tokens


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(3, 40), st.floats(0.01, 1), st.integers(0, 9))
def test_masks_hide_as_many_ordinary_tokens_as_those_of_the_pipeline(count, length, rate, seed):
    tokens = sequences(count, length, seed)
    random = np.random.default_rng(seed)
    features, labels, weights = text._masked(tokens, random, tokenizer=TOKENIZER, rate=rate)
    theirs, _, their_weights = pipelines.mask_tokens(TOKENIZER, rate=rate)(tokens, (0, seed))
    assert {n: (a.shape, a.dtype) for n, a in features.items()} == {
        n: (tuple(a.shape), a.dtype.as_numpy_dtype) for n, a in theirs.items()
    }
    np.testing.assert_allclose(weights, their_weights.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(features["padding_mask"], theirs["padding_mask"])
    restored, positions = features["token_ids"].copy(), features["mask_positions"]
    used = weights > 0
    for row, at, label, is_used in zip(restored, positions, labels, used, strict=True):
        assert len({*at[is_used]}) == is_used.sum()
        row[at[is_used]] = label[is_used]
    np.testing.assert_array_equal(restored, tokens)
    assert (labels[used] >= 5).all()
    assert (labels[~used] == 0).all()


def test_most_masked_tokens_are_hidden_some_drawn_and_some_kept():
    tokens = sequences(2000, 40)
    features, labels, weights = text._masked(tokens, tokenizer=TOKENIZER, rate=0.5)
    used = weights > 0
    seen = np.take_along_axis(features["token_ids"], features["mask_positions"], axis=1)[used]
    assert np.mean(seen == MASK) == pytest.approx(0.8 + 0.1 / WORDS, abs=0.01)
    assert np.mean(seen == labels[used]) == pytest.approx(0.1 + 0.1 / WORDS, abs=0.01)
    again, *_ = text._masked(tokens, tokenizer=TOKENIZER, rate=0.5)
    np.testing.assert_array_equal(again["token_ids"], features["token_ids"])


@pytest.mark.parametrize("preset", ["no_such_model", "gpt2_base_en", "./nowhere"])
def test_a_preset_that_cannot_be_had_is_named_with_those_that_can(preset, monkeypatch):
    models = pytest.importorskip("keras_hub").models
    monkeypatch.setenv("KAGGLEHUB_CACHE", "/nowhere")  # downloaded nothing so far
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(proxy, "http://localhost:9")  # no network
    wanted = f"Received: preset='{preset}'.*one of .*gpt2_base_en"
    with pytest.raises(errors.FileInputError, match=wanted) as raised:
        text.from_preset(models.GPT2Tokenizer, preset)
    assert "\n" not in str(raised.value)


# Pairs of a prompt and its answer.


class Words:
    """Tokenizes words that are numbers."""

    start_token_id, end_token_id, pad_token_id = START, END, PAD

    def __call__(self, texts):
        return [[int(word) for word in of.split()] for of in texts]


@pytest.mark.parametrize(
    ("length", "row", "is_answer"),
    [
        (8, [START, 10, 11, 20, 21, END, PAD, PAD], [0, 0, 0, 1, 1, 1, 0, 0]),
        (5, [10, 11, 20, 21, END], [0, 0, 1, 1, 1]),  # the prompt's first tokens are left out
        (3, [11, 20, 21], [0, 1, 1]),
    ],
)
def test_of_a_pair_the_answers_tokens_count(length, row, is_answer):
    found = text.sequences_or_pairs([("10 11", "20 21")], Words(), length)
    ids, answers = next(iter(found))
    assert (ids.numpy().tolist(), answers.numpy().tolist()) == (row, is_answer)


def test_a_tokenizer_without_a_start_begins_with_its_end():
    words = Words()
    words.start_token_id = words.pad_token_id = None
    ids, answers = next(iter(text.sequences_or_pairs([("10", "20")], words, 6)))
    assert ids.numpy().tolist() == [END, 10, 20, END, 0, 0]
    assert answers.numpy().tolist() == [0, 0, 1, 1, 0, 0]


def test_a_file_of_pairs_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(errors.FileInputError, match=r"no such file of pairs: .*nowhere.jsonl"):
        text.load_texts_or_pairs(str(tmp_path / "nowhere.jsonl"))


def test_what_counts_averages_one_in_a_batch():
    ids = np.arange(12).reshape(2, 6)
    answers = np.array([[0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]])
    features, following, weights = text.next_tokens((ids, answers))
    np.testing.assert_array_equal(features["token_ids"], ids[:, :-1])
    np.testing.assert_array_equal(following, ids[:, 1:])
    np.testing.assert_allclose(weights, answers[:, 1:] * 10 / 3, rtol=1e-6)


def test_pairs_are_read_and_each_is_in_one_split(tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [("prompt", f"answer {number}") for number in range(40)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    file.write_text("\n".join(lines))
    found = text.load_texts_or_pairs(str(file))
    assert sorted([*found.train, *found.validation, *found.test]) == sorted(pairs)
    assert (len(found.validation), len(found.test)) == (2, 2)


@pytest.mark.parametrize("line", ['{"prompt": "a"}', "not JSON", "[1, 2]"])
def test_a_line_that_is_no_pair_is_one_sentence(line, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' + line)
    with pytest.raises(errors.InputError, match=r"Line 2 of .*pairs.jsonl is no JSON object"):
        text.load_texts_or_pairs(str(file))
