import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import pipelines


def values(dataset):
    return [element.numpy() for element in dataset]


@settings(max_examples=10)
@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=8),
    length=st.integers(0, 12),
)
def test_longer_than_counts_the_bytes_of_the_text_of_an_example(texts, length):
    written = [text.encode() for text in texts]
    kept = [text for text in written if len(text) > length]
    longer = pipelines.longer_than(length)
    lines = tf.data.Dataset.from_tensor_slices(written)
    assert values(lines.apply(pipelines.filter_by(longer))) == kept
    labelled = tf.data.Dataset.zip(lines, tf.data.Dataset.range(len(texts)))
    assert [text.numpy() for text, _ in labelled.filter(longer)] == kept


def test_shuffling_after_the_cache_gives_new_orders_and_the_same_for_the_same_seed():
    def orders(seed):
        numbers = tf.data.Dataset.range(50).apply(pipelines.cache())
        shuffled = numbers.apply(pipelines.shuffle(50, seed=seed))
        return [tuple(values(shuffled)) for _ in range(2)]

    assert orders(1) == orders(1)
    assert len({*orders(1), *orders(2)}) == 4


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: pipelines.longer_than(-1), "`length` must be a non-negative.*length=-1"),
        (lambda: pipelines.shuffle(0), "`buffer_size` must be a positive.*buffer_size=0"),
        (lambda: pipelines.auto_shard("files"), "`policy` must be one of 'data', 'file', 'off'"),
        (lambda: pipelines.batch_for(6, replicas=4), "nearest sizes that work are 4 and 8"),
    ],
)
def test_bad_arguments_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@settings(max_examples=10)
@given(examples=st.integers(0, 30), size=st.integers(1, 7), drop=st.booleans())
def test_counting_finds_what_filter_hides(examples, size, drop):
    pairs = tf.data.Dataset.range(examples).map(lambda n: (n, {"double": 2 * n}))
    batches = pairs.filter(lambda n, _: n % 2 == 0).batch(size, drop_remainder=drop)
    assert batches.cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert pipelines.count_batches(batches) == len(list(batches))


def test_counting_an_endless_dataset_raises():
    with pytest.raises(ValueError, match=r"`dataset` never ends.*Take `.repeat\(...\)` out"):
        pipelines.count_batches(tf.data.Dataset.range(3).repeat())
