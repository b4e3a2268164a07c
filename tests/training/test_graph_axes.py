"""What the rules say of an operation holds when its examples are split."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from kdpkit.training.tensorflow._graph_axes import FLAT, MEAN, SUM, UNFIT
from kdpkit.training.tensorflow._step_graph import StepGraph, labels_of

pytestmark = pytest.mark.tensorflow
W = tf.constant(np.random.default_rng(0).normal(size=(4, 3)).astype("float32"))
TABLE = tf.constant(np.random.default_rng(1).normal(size=(9, 5)).astype("float32"))


def ids(x):
    return tf.cast(tf.abs(x) * 3, tf.int32) % 9


def gradient_of(reduce):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(W)
            value = reduce(tf.tanh(tf.matmul(x, W)))
        return tape.gradient(value, W)

    return gradient


# Of examples of shape (n, 4) each entry of which is computed from one of them, or a sum or mean.
APART = {
    "elementwise": lambda x: tf.nn.relu(x) * 2.0 + tf.exp(-tf.square(x)),
    "with a constant": lambda x: tf.maximum(x, tf.constant([0.0, 1.0, 2.0, 3.0])),
    "matmul": lambda x: tf.matmul(x, W),
    "matmul of a transposed": lambda x: tf.matmul(W, x, transpose_a=True, transpose_b=True),
    "tensordot": lambda x: tf.tensordot(tf.reshape(x, (-1, 2, 2)), W[:2], [[2], [0]]),
    "cross-entropies": lambda x: tf.nn.softmax_cross_entropy_with_logits(
        tf.tile(tf.nn.softmax(x)[:, None], [1, 2, 1]), tf.tile(tf.sin(x)[:, None], [1, 2, 1])
    ),
    "sparse cross-entropies": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        ids(x[:, :2]) % 3, tf.tile(x[:, None, :3], [1, 2, 1])
    ),
    "batched matmul": lambda x: tf.matmul(x[:, :, None], x[:, None, :]),
    "einsum": lambda x: tf.einsum("bi,ij->bj", x, W),
    "einsum of two": lambda x: tf.einsum("bi,bj->bij", x, x),
    "softmax": lambda x: tf.nn.softmax(x),
    "softmax of a transposed": lambda x: tf.nn.softmax(tf.transpose(x)[..., None]),
    "sum of entries": lambda x: tf.reduce_sum(x, axis=-1),
    "max of entries, kept": lambda x: tf.reduce_max(x, axis=1, keepdims=True),
    "argmax": lambda x: tf.cast(tf.argmax(x, axis=-1), tf.float32),
    "top k": lambda x: tf.math.top_k(x, 2).values,
    "cumulative": lambda x: tf.cumsum(x, axis=1),
    "reshape": lambda x: tf.reshape(x, (-1, 2, 2)),
    "flat": lambda x: tf.reshape(x, (-1,)),
    "expanded": lambda x: tf.squeeze(tf.expand_dims(x, 1), [1]),
    "new axis first": lambda x: x[None, :, 1],
    "transposed twice": lambda x: tf.transpose(tf.sin(tf.transpose(x))),
    "joined entries": lambda x: tf.concat([x, tf.square(x)], axis=-1),
    "stacked": lambda x: tf.stack([x, -x], axis=1),
    "stacked first": lambda x: tf.stack([x, -x], axis=0),
    "unstacked": lambda x: tf.unstack(x, axis=1)[2],
    "split entries": lambda x: tf.split(x, 2, axis=1)[1],
    "a slice of entries": lambda x: x[:, 1:3],
    "an entry": lambda x: x[..., -1],
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 2]]),
    "tiled": lambda x: tf.tile(x, [1, 3]),
    "looked up": lambda x: tf.gather(TABLE, ids(x)),
    "one hot": lambda x: tf.one_hot(ids(x), 9),
    "chosen entries": lambda x: tf.gather(x, [2, 0], axis=1),
    "chosen by example": lambda x: tf.gather(x, ids(x)[:, :2] % 4, batch_dims=1),
    "a condition": lambda x: tf.where(x > 0, x, 0.1 * x),
    "convolved": lambda x: tf.nn.conv1d(x[..., None], tf.ones((2, 1, 3)), 1, "SAME"),
    "norm of each": lambda x: x / tf.norm(x, axis=-1, keepdims=True),
    "a function": lambda x: tf.function(lambda y: tf.nn.softmax(tf.matmul(y, W)))(x),
    "sum": lambda x: tf.reduce_sum(tf.square(x)),
    "sum of a flat transposed": lambda x: tf.reduce_sum(tf.sin(tf.reshape(tf.transpose(x), [-1]))),
    "sum over examples": lambda x: tf.reduce_sum(x, axis=0),
    "mean": lambda x: tf.reduce_mean(tf.abs(x)),
    "means": lambda x: 2.0 * tf.reduce_mean(x, 0) + 3.0 * tf.reduce_mean(tf.square(x), 0),
    "Gram matrix of entries": lambda x: tf.matmul(x, x, transpose_a=True),
    "half the squares": tf.nn.l2_loss,
    "a sum over how many": lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    "a sum over one or more": lambda x: (
        tf.reduce_sum(x) / tf.maximum(tf.cast(tf.shape(x)[0], tf.float32), 1.0)
    ),
    "a mean times how many": lambda x: tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], tf.float32),
    "a sum over hardly more": lambda x: (
        tf.reduce_sum(x) / (tf.cast(tf.shape(x)[0], tf.float32) + 1e-7)
    ),
    "a sum over all sizes": lambda x: tf.reduce_sum(x, axis=0) / tf.cast(tf.size(x), tf.float32),
    "a sum, and one over how many": lambda x: (
        0.0 * tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32) + tf.reduce_sum(tf.sin(x))
    ),
    "a sum of what was divided": lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32)),
    "a sum of flattened entries": lambda x: tf.reduce_sum(tf.reshape(x, (tf.shape(x)[0], 2, 2))),
    "gradient of a mean": gradient_of(tf.reduce_mean),
    "gradient of a sum": gradient_of(tf.reduce_sum),
    "a mean, divided": lambda x: tf.reduce_mean(x) / 3.0 - tf.reduce_mean(tf.square(x)),
}
# What depends on how examples are split.
TOGETHER = {
    "max": tf.reduce_max,
    "max over examples": lambda x: tf.reduce_max(x, axis=0),
    "square of a mean": lambda x: tf.square(tf.reduce_mean(x)),
    "product of means": lambda x: tf.reduce_mean(x) * tf.reduce_mean(tf.square(x)),
    "a ratio of sums": lambda x: tf.reduce_sum(x) / tf.reduce_sum(tf.square(x)),
    "centered": lambda x: x - tf.reduce_mean(x, axis=0),
    "scaled": lambda x: x * tf.reduce_mean(x),
    "a constant over a sum": lambda x: 1.0 / tf.reduce_sum(x),
    "softmax over examples": lambda x: tf.nn.softmax(x, axis=0),
    "softmax of losses": lambda x: tf.nn.softmax(tf.reduce_sum(x, -1)),
    "all pairs": lambda x: tf.matmul(x, x, transpose_b=True),
    "all pairs by einsum": lambda x: tf.einsum("if,jf->ij", x, x),
    "all differences": lambda x: x[:, None] - x[None],
    "columns and rows": lambda x: x[:, :1] - x[:, 0],
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: tf.roll(x, 1, axis=0),
    "shifted": lambda x: x[1:] - x[:-1],
    "cumulative over examples": lambda x: tf.cumsum(x, axis=0),
    "cumulative log": lambda x: tf.math.cumulative_logsumexp(x[:, 0]),
    "sorted": lambda x: tf.sort(x[:, 0]),
    "the largest": lambda x: tf.math.top_k(x[:, 0], 1).values,
    "chosen examples": lambda x: tf.gather(x, [0, 0]),
    "a boolean mask": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "counted by a shape": lambda x: tf.cast(tf.shape(tf.where(x > 0))[0], tf.float32),
    "a rounded sum": lambda x: tf.cast(tf.reduce_sum(x), tf.int32),
    "a product over examples": lambda x: tf.reduce_prod(x, axis=0),
    "pairs of neighbors": lambda x: tf.reshape(x, (-1, 8)),
    "pairs by a joined shape": lambda x: tf.reshape(x, tf.concat([[-1], [8]], axis=0)),
    "halves": lambda x: tf.split(x, 2, axis=0)[0],
    "another order": lambda x: tf.reshape(tf.transpose(x), (-1, 4)),
    "a condition on all": lambda x: tf.cond(tf.reduce_max(x) > 1.0, lambda: x, lambda: 2.0 * x),
    "a loop over all": lambda x: tf.while_loop(
        lambda y: tf.reduce_max(y) > 1.0, lambda y: (y / 2,), (x,)
    )[0],
    "Python": lambda x: tf.numpy_function(np.sort, [x], tf.float32),
    "padded with examples": lambda x: tf.pad(x, [[1, 0], [0, 0]]),
    "as many as": lambda x: tf.reduce_mean(x) * tf.cast(tf.shape(x)[0] == 4, tf.float32),
    "a sum over a root": lambda x: tf.reduce_sum(x) / tf.sqrt(tf.cast(tf.shape(x)[0], tf.float32)),
    "a sum over one less": lambda x: tf.reduce_sum(x) / (tf.cast(tf.shape(x)[0], tf.float32) - 1.0),
    "at most so many": lambda x: (
        tf.reduce_sum(x) / tf.minimum(tf.cast(tf.shape(x)[0], tf.float32), 3.0)
    ),
    "positions": lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)[:, None],
    "constant examples beside": lambda x: tf.concat([x, TABLE[:3, :4]], axis=0),
}


def label_of(function, spec=None):
    spec = spec or tf.TensorSpec([None, 4])
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
    axes = {(part.op.name, part.value_index): axis for part, axis in labels_of(traced.inputs[0])}
    if not isinstance(spec, tf.TensorSpec):
        axes = {(x.op.name, x.value_index): FLAT for x in traced.inputs}
    return StepGraph(traced.graph, axes).axis(traced.outputs[0])


@pytest.mark.parametrize("name", APART)
@hypothesis.settings(max_examples=5)
@hypothesis.given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_what_is_computed_apart_is_so_however_it_is_split(name, first, second, seed):
    function = APART[name]
    x = np.random.default_rng(seed).normal(size=(first + second, 4)).astype("float32")
    one, other = (np.asarray(function(tf.constant(part))) for part in (x[:first], x[first:]))
    both = np.asarray(function(tf.constant(x)))
    axis = label_of(function)
    if axis in (MEAN, SUM):
        mean = (first * one + second * other) / (first + second)
        np.testing.assert_allclose(both, mean if axis == MEAN else one + other, atol=1e-3)
    else:
        assert axis is not None
        assert axis >= 0
        np.testing.assert_allclose(np.concatenate([one, other], axis), both, atol=1e-5)


@pytest.mark.parametrize("name", TOGETHER)
def test_what_compares_examples_is_found(name):
    assert label_of(TOGETHER[name]) == UNFIT


def test_entries_of_ragged_examples_may_be_added_and_not_averaged():
    spec = tf.RaggedTensorSpec([None, None], tf.float32)
    assert label_of(lambda x: tf.reduce_sum(x.flat_values), spec) == SUM
    assert label_of(lambda x: tf.reduce_mean(x.flat_values), spec) == UNFIT
    assert label_of(lambda x: tf.exp(x.flat_values), spec) == FLAT


@pytest.mark.parametrize("inside", ["function", "condition"])
def test_what_is_assigned_inside_and_read_again_is_found(inside):
    kept = tf.Variable(0.0)

    def keep(x):
        return tf.cast(kept.assign(tf.reduce_mean(x)), tf.float32)

    def step(x):
        if inside == "function":
            tf.function(keep)(x)
        else:
            tf.cond(tf.reduce_max(x) > 1.0, lambda: keep(x), lambda: 0.0)
        return x * kept

    assert label_of(step) == UNFIT


def test_what_does_not_depend_on_examples_has_no_label():
    assert label_of(lambda x: tf.reduce_sum(tf.zeros_like(x)) + tf.reduce_max(W)) is None


def test_a_loop_assigns_what_its_body_assigns_and_not_what_it_reads():
    read, counted = tf.Variable(1.0), tf.Variable(0.0)

    def body(i, total):
        counted.assign_add(total)
        return i + 1, total * read

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def step(x):
        return tf.while_loop(lambda i, _: i < 2, body, (0, tf.reduce_sum(x)))

    graph = step.get_concrete_function().graph
    (x, *_) = graph.inputs
    assigned = [id(handle) for handle, *_ in StepGraph(graph, {(x.op.name, 0): 0}).assigned]
    captured = {id(outer): id(inner) for outer, inner in graph.captures}
    assert assigned == [captured[id(counted.handle)]]
