"""The language recipes' token ids, in NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import errors, pipelines
from kdpkit.experiment import text

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

PAD, START, END = 0, 2, 3
SPECIAL = {"start": START, "end": END, "pad": PAD}
DOCUMENTS = st.lists(st.lists(st.integers(5, 49), max_size=9), min_size=1, max_size=6)


class Numbers:
    start_token_id, end_token_id, pad_token_id = START, END, PAD

    def __call__(self, texts):
        return [[int(word) for word in line.split()] for line in texts]


@settings(max_examples=4)  # each builds a pipeline
@given(DOCUMENTS, st.integers(3, 8))
def test_sequences_are_the_full_ones_of_the_pipeline(documents, length):
    stream = tf.data.Dataset.from_generator(
        lambda: iter(documents), output_signature=tf.TensorSpec([None], tf.int32)
    )
    packed = [*stream.apply(pipelines.pack_tokens(length, **SPECIAL)).as_numpy_iterator()]
    full = [sequence for sequence in packed if sequence[-1] != PAD]
    lines = [" ".join(map(str, document)) for document in documents]
    if full:
        np.testing.assert_array_equal(text.sequences(lines, Numbers(), length), full)
    else:
        with pytest.raises(errors.InputError, match=f"shorter than a sequence.*length={length}"):
            text.sequences(lines, Numbers(), length)


@pytest.mark.parametrize(
    ("length", "row", "is_answer", "lost"),
    [
        (8, [START, 10, 11, 20, 21, END, PAD, PAD], [0, 0, 0, 1, 1, 1, 0, 0], None),
        (6, [START, 10, 11, 20, 21, END], [0, 0, 0, 1, 1, 1], None),
        (5, [10, 11, 20, 21, END], [0, 0, 1, 1, 1], 0),  # the prompt's first tokens are left out
        (3, [11, 20, END], [0, 1, 1], 1),
    ],
)
def test_of_a_pair_the_answers_tokens_count(length, row, is_answer, lost, capsys):
    ids, answers = text.answers([("10 11", "20 21")], Numbers(), length)
    assert (ids.tolist(), answers.tolist()) == ([row], [is_answer])
    printed = capsys.readouterr().out
    if lost is None:
        assert not printed
    else:
        assert f"Of 1 pairs 1 have more than {length} tokens" in printed
        assert f"and {lost} also the end of the answer" in printed


def test_a_tokenizer_without_a_start_begins_with_its_end():
    tokenizer = Numbers()
    tokenizer.start_token_id = tokenizer.pad_token_id = None
    ids, answers = text.answers([("10", "20")], tokenizer, 6)
    assert ids.tolist() == [[END, 10, 20, END, 0, 0]]
    assert answers.tolist() == [[0, 0, 1, 1, 0, 0]]


def test_weights_of_answers_average_one():
    ids = np.arange(12).reshape(2, 6)
    answers = np.array([[0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]])
    features, following, weights = text.next_tokens(ids, answers)
    np.testing.assert_array_equal(features["token_ids"], ids[:, :-1])
    np.testing.assert_array_equal(following, ids[:, 1:])
    np.testing.assert_allclose(weights, answers[:, 1:] * 10 / 3, rtol=1e-6)


@pytest.mark.parametrize("preset", ["no_such_model", "gpt2_base_en", "./nowhere"])
def test_a_preset_that_cannot_be_loaded_is_named_with_the_existing_ones(
    preset, monkeypatch, tmp_path
):
    models = pytest.importorskip("keras_hub").models
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))  # nothing has been downloaded
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(proxy, "http://localhost:9")  # no network
    expected = f"Received: preset='{preset}'.*one of .*gpt2_base_en"
    with pytest.raises(errors.FileInputError, match=expected) as raised:
        text.from_preset(models.GPT2Tokenizer, preset)
    assert "\n" not in str(raised.value)


def test_the_commonest_label_is_counted_by_the_weights_of_all_batches():
    first = None, np.array([[3, 3], [3, 7]]), np.array([[0.0, 0.0], [1.0, 2.0]])
    second = None, np.array([[9, 7]]), np.array([[1.0, 1.0]])
    assert text._commonest_label([first, second]) == (7, 3 / 5)


def test_gaps_are_the_rarer_words_of_short_sentences_once_each():
    line = "The path must be a bytes-like object here. The path must be a bytes-like object here."
    gaps = text._gaps([line, "Too short a path."], {"path", "like", "here"})
    assert gaps == [
        ("The ", "path", " must be a bytes-like object here."),
        ("The path must be a bytes-like object ", "here", "."),
    ]
