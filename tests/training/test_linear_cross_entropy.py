import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from kdpkit.training import linear_cross_entropy
from kdpkit.training._linear_cross_entropy import _chunk_length

ON_JAX = keras.backend.backend() == "jax"


def gradients(loss, arguments, jit):
    """Return the loss of each position and the gradients of their sum, as NumPy arrays."""
    if ON_JAX:
        import jax

        def total(*values):
            losses = loss(*values)
            return losses.sum(), losses

        derive = jax.grad(total, argnums=range(len(arguments)), has_aux=True)
        found, losses = (jax.jit(derive) if jit else derive)(*map(ops.array, arguments))
    else:
        import tensorflow as tf

        @tf.function(jit_compile=jit, autograph=False)
        def derive(*values):
            with tf.GradientTape() as tape:
                tape.watch(values)
                losses = loss(*values)
            return tape.gradient(losses, values), losses

        found, losses = derive(*map(tf.constant, arguments))
    return [np.asarray(ops.cast(value, "float32")) for value in (losses, *found)]


def both(positions, width, size, chunk_size, *, jit, seed=0, scale=1.0, dtype="float32"):
    random = np.random.default_rng(seed)
    hidden, kernel, bias = (
        scale * random.normal(size=shape).astype("float32")
        for shape in ((positions, width), (size, width), (size,))
    )
    labels = random.integers(0, size, positions)

    def chunked(hidden, kernel, bias):
        hidden, kernel = ops.cast(hidden, dtype), ops.cast(kernel, dtype)
        return linear_cross_entropy(hidden, kernel, labels, bias=bias, chunk_size=chunk_size).losses

    def with_all_logits(hidden, kernel, bias):
        logits = ops.matmul(hidden, ops.transpose(kernel)) + bias
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

    arguments = (hidden, kernel, bias)
    return gradients(chunked, arguments, jit), gradients(with_all_logits, arguments, jit=False)


def assert_close(ours, theirs, tolerance):
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one - other).max() <= tolerance * max(1.0, np.abs(other).max())


@settings(max_examples=8)
@given(
    positions=st.integers(1, 9),
    width=st.integers(1, 6),
    size=st.integers(2, 40),
    chunk_size=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_are_those_of_all_logits(positions, width, size, chunk_size, seed):
    assert_close(*both(positions, width, size, chunk_size, seed=seed, jit=False), 1e-5)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"scale": 30.0}, 1e-5),  # logits are far apart
        pytest.param({"dtype": "bfloat16"}, 3e-2, marks=pytest.mark.slow),
    ],
)
def test_they_are_so_under_xla(settings, tolerance):
    assert_close(*both(20, 16, 300, 100, jit=True, **settings), tolerance)


def test_predictions_are_the_most_probable_tokens_and_shapes_stay():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(2, 3, 4)).astype("float32")
    kernel = random.normal(size=(11, 4)).astype("float32")
    labels = random.integers(0, 11, (2, 3)).astype("int64")
    loss = linear_cross_entropy(hidden, kernel, labels, chunk_size=4)
    np.testing.assert_array_equal(loss.predictions, (hidden @ kernel.T).argmax(axis=-1))
    assert tuple(loss.losses.shape) == (2, 3)


@given(size=st.integers(1, 60_000), chunk_size=st.integers(1, 4200))
def test_chunks_are_about_equal_no_longer_than_asked_for_and_aligned(size, chunk_size):
    length, least = _chunk_length(size, chunk_size), -(-size // -(-size // chunk_size))
    assert least <= length <= min(chunk_size, least + 7)
    assert length % 8 == 0 or chunk_size % 8
    assert _chunk_length(50_257, 4096) == 3872  # of GPT-2, in 13 chunks


def test_tokens_of_probability_zero_may_fill_a_chunk():
    hidden, kernel = np.eye(3, 4, dtype="float32"), np.eye(9, 4, dtype="float32")
    bias = np.array([-np.inf] * 4 + [0.0] * 5, "float32")
    labels = np.array([4, 5, 8])

    def losses(chunk_size):
        return lambda *values: (
            linear_cross_entropy(*values[:2], labels, bias=values[2], chunk_size=chunk_size).losses
        )

    chunked, complete = (gradients(losses(size), (hidden, kernel, bias), True) for size in (3, 9))
    np.testing.assert_allclose(complete[0], np.log(5.0), rtol=1e-6)
    assert_close(chunked, complete, 1e-6)


@pytest.mark.parametrize("label", [-1, 5])
def test_labels_outside_of_the_vocabulary_are_never_trained_on(label):
    arguments = np.eye(2, 4, dtype="float32"), np.eye(5, 4, dtype="float32")

    def losses(hidden, kernel):
        return linear_cross_entropy(hidden, kernel, np.array([1, label]), chunk_size=2).losses

    for of_loss in gradients(losses, arguments, jit=True):
        assert np.isnan(of_loss).any()


@pytest.mark.parametrize(
    ("kernel", "labels", "bias"),
    [((5, 4), (2,), None), ((5, 3), (2, 1), None), ((5, 3), (2,), (3,))],
)
def test_shapes_that_do_not_fit_get_one_sentence(kernel, labels, bias):
    arguments = ops.ones((2, 3)), ops.ones(kernel), ops.zeros(labels, "int32")
    with pytest.raises(ValueError, match=r"`hidden` is \[..., width\].*Received: hidden=\(2, 3\)"):
        linear_cross_entropy(*arguments, bias=None if bias is None else ops.ones(bias))
