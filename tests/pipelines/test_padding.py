import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import strategies, testing
from kdpkit.pipelines import normalize_weights, pad_to_global_batch
from kdpkit.testing import generators


def only(dataset):
    (element,) = list(dataset)
    return element


def as_tensor(array):
    return tf.ragged.constant(array.tolist()) if array.dtype == object else tf.constant(array)


@settings(max_examples=12)
@given(
    data=generators.datasets(min_size=1, max_size=6),
    filling=st.integers(0, 4),
    mode=st.sampled_from(["train", "eval"]),
    weighted=st.booleans(),
)
def test_any_nest_is_padded_and_its_real_examples_kept(data, filling, mode, weighted):
    x = tf.nest.map_structure(as_tensor, data.examples)
    examples = int(tf.nest.flatten(x)[0].shape[0])
    counted = tf.range(examples)
    y = {"a": counted, "b": (counted % 2 == 0,), "c": tf.sparse.from_dense(counted[:, None] % 3)}
    size = examples + filling
    weights = np.arange(1.0, 2 * examples + 1, dtype="float32").reshape(examples, 2)
    batch = (x, y, weights) if weighted else (x, y)
    padded = only(tf.data.Dataset.from_tensors(batch).apply(pad_to_global_batch(size, mode=mode)))
    for before, after in zip(tf.nest.flatten((x, y)), tf.nest.flatten(padded[:2]), strict=True):
        dense = before.to_tensor() if isinstance(before, tf.RaggedTensor) else before
        dense = tf.sparse.to_dense(before) if isinstance(before, tf.SparseTensor) else dense
        assert after.shape[0] == size
        # The last example, not zeros, of which some layers make NaN.
        rows = np.minimum(np.arange(size), examples - 1)
        np.testing.assert_array_equal(after, dense.numpy()[rows])
    share = size / examples  # of one batch in both modes
    given_weight = weights if weighted else np.ones(examples)
    expected = np.concatenate([given_weight * share, np.zeros((filling, *given_weight.shape[1:]))])
    np.testing.assert_allclose(padded[2], expected, rtol=1e-6)


@pytest.mark.slow
def test_training_on_a_padded_batch_is_training_on_the_real_examples():
    examples, replicas = 5, 4
    x, y = testing.toy_classification(examples)
    plain = tf.data.Dataset.from_tensors((x, y, np.linspace(0.5, 2, examples, dtype="float32")))

    def step(dataset, replicas):
        with strategies.select_strategy("mirrored", devices=replicas).scope():
            model = testing.tiny_classifier()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(1.0), loss)
        model.fit(dataset, verbose=0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    padded = step(plain.apply(pad_to_global_batch(8)), replicas)
    np.testing.assert_allclose(padded, step(plain, 1), rtol=0, atol=1e-5)


def test_normalized_weights_make_the_loss_of_evaluate_the_weighted_mean():
    random = np.random.default_rng(0)
    x, y = testing.toy_classification(11)
    weight = random.integers(0, 2, 11).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(4)
    batches = batches.apply(pad_to_global_batch(4, mode="eval")).apply(normalize_weights)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = testing.tiny_classifier()
        model.compile(loss=loss)
    each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)(y, model(x))
    expected = float(np.sum(each * weight) / np.sum(weight))
    assert model.evaluate(batches, verbose=0) == pytest.approx(expected, rel=1e-5)


def of_one(*batch):
    return tf.data.Dataset.from_tensors(batch)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: pad_to_global_batch(4, mode="predict"), "`mode` must be one of 'train', 'eval'"),
        (lambda: pad_to_global_batch(0), "`global_batch_size` must be a positive"),
        (lambda: of_one([1.0], [1]).apply(normalize_weights), r"\(x, y, sample_weight\)"),
        (lambda: of_one([1.0], [1], [0.0]).apply(normalize_weights), "Every sample weight is 0"),
        (lambda: only(of_one([1, 2], [3, 4]).apply(pad_to_global_batch(1))), "more examples than"),
    ],
)
def test_bad_input_gets_one_sentence(make, sentence):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=sentence):
        make()
