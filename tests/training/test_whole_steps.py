"""What a step computes on one device is said; what it reads and changes keeps its order."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kdpkit import strategies
from kdpkit.training import replica_exact
from tests.training.exactness import assert_close

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(7, 12)).astype("float32")
Y = np.arange(7) % 3


class Sorted(layers.Layer):
    def call(self, x):
        return tf.sort(x[:, :, None] * x[:, None, :], axis=0)[:, 0]  # over the examples


def trained(make, replicas, loss="sparse_categorical_crossentropy", **settings):
    keras.utils.set_random_seed(0)
    with strategies.select_strategy("mirrored", devices=replicas).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), loss, **settings)
        model = replica_exact(model)
    logs = [model.train_on_batch(X, Y) for _ in range(2)]
    return [*model.get_weights(), *logs]


def of_layers(*middle):
    return lambda: keras.Sequential([*(make() for make in middle), layers.Dense(3, "softmax")])


def test_an_operation_without_a_rule_is_named_with_its_line(capsys):
    make = of_layers(lambda: layers.Dense(8, "relu"), Sorted)
    assert_close(trained(make, 2, jit_compile=False), trained(make, 1, jit_compile=False))
    lines = pathlib.Path(__file__).read_text("utf-8").splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "# over the examples" in line)
    (line,) = re.findall("kdpkit: About .*", capsys.readouterr().err)
    assert re.search(
        rf"[0-9]+% of the step's work.*at test_whole_steps\.py:{number} \([0-9]+%", line
    )


def squared(y, predicted):
    return (tf.one_hot(tf.cast(y, tf.int32), 3) - predicted) ** 2


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", squared])
def test_a_step_that_is_divided_says_nothing(loss, capsys):
    dense = [lambda: layers.Dense(9, "relu"), layers.BatchNormalization]
    loop = [lambda: layers.Reshape((-1, 3)), lambda: layers.LSTM(4, recurrent_dropout=0.2)]
    trained(of_layers(*dense, *loop), 2, loss=loss)
    assert "kdpkit" not in capsys.readouterr().err


def test_tensors_that_nothing_compares_are_all_divided(capsys):
    with strategies.select_strategy("mirrored", devices=2).scope():
        kernel = tf.Variable(tf.ones([12, 8]))

    @replica_exact
    def step(x, y):
        return tf.reduce_mean(x @ kernel), tf.reduce_mean(tf.sin(y @ kernel))

    step(X, X * 2)
    assert "kdpkit" not in capsys.readouterr().err


class OfOneLength(keras.Model):
    """Its Python needs the number of examples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, "softmax")

    def call(self, x):
        return self.dense(tf.reshape(x, (int(x.shape[0]), 12)))


def test_a_step_for_one_length_is_computed_whole_and_says_so():
    one = trained(OfOneLength, 1, jit_compile=False)
    with pytest.warns(UserWarning, match="One device computes the step for all .*TypeError: int"):
        many = trained(OfOneLength, 2, jit_compile=False)
    assert_close(many, one)


class OfEqualHalves(OfOneLength):
    """TensorFlow finds that it takes batches of seven alone."""

    def call(self, x):
        return self.dense(tf.concat([tf.ensure_shape(x, (7, 12))[:3], x[3:]], 0))


def test_a_step_whose_shapes_are_of_one_length_is_computed_whole_and_says_so():
    one = trained(OfEqualHalves, 1, jit_compile=False)
    with pytest.warns(UserWarning, match="does not work for batches of any length: ValueError"):
        many = trained(OfEqualHalves, 2, jit_compile=False)
    assert_close(many, one)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_a_step_reads_and_changes_variables_in_its_order(replicas, jit):
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    with strategy.scope():
        weight, count = tf.Variable(tf.ones([12])), tf.Variable(0.0)

    @replica_exact
    @tf.function(jit_compile=jit)
    def step(x):
        before = tf.reduce_mean(x * weight)
        count.assign_add(before)
        weight.assign_sub(tf.reduce_sum(x, 0) * count)
        return before, tf.reduce_mean(x * weight), count.read_value()

    expected = np.ones(12, "float32"), np.float32(0)
    for x in (X, X[:2], X):
        before = (x * expected[0]).mean()
        total = expected[1] + before
        expected = expected[0] - x.sum(0) * total, total
        found = [np.asarray(value) for value in step(x)]
        np.testing.assert_allclose(found, [before, (x * expected[0]).mean(), total], rtol=1e-4)


def test_a_step_without_examples_is_computed_once():
    with strategies.select_strategy("mirrored", devices=2).scope():
        count = tf.Variable(0.0)

    @replica_exact
    def step(by=1.0):
        return count.assign_add(by)

    assert [float(step()), float(step(tf.constant(2.0))), float(count)] == [1, 3, 3]


def test_the_batch_is_what_most_tensors_are_as_long_as():
    kernel = tf.reshape(tf.range(36.0), (3, 12))

    def step(kernel, x, y):
        return tf.reduce_mean((x - kernel[:1]) ** 2 @ kernel[0][:, None] * y[:, None])

    y = tf.cast(Y, tf.float32)
    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    assert_close([exact(kernel, X, y)], [step(kernel, X, y)])


@pytest.mark.parametrize(
    "method",
    [
        lambda v, x: v[1:3].assign(x[:2]),
        lambda v, x: v.scatter_nd_update([[3], [1]], x[:2]),
        lambda v, x: v.batch_scatter_update(tf.IndexedSlices(x[:2], [3, 1])),
        lambda v, x: v.assign_add(x[:7] * v.gather_nd([[1]]) + v.sparse_read([2])),
    ],
)
def test_methods_of_a_variable_read_and_change_all_copies(method):
    """As queues of keys and other memories do, which stock strategies do not let do it."""
    one = tf.Variable(X[:, ::-1])
    with strategies.select_strategy("mirrored", devices=2).scope():
        many = tf.Variable(X[:, ::-1])
    exact = replica_exact(lambda x: (method(many, x), tf.reduce_sum(many @ tf.transpose(x)))[1])
    method(one, X)
    expected = np.sum(one.numpy() @ X.T)
    assert_close([exact(X), *(copy.numpy() for copy in many.values)], [expected, one, one])


def test_xla_compiles_a_step_that_changes_parts_of_a_variable():
    with strategies.select_strategy("mirrored", devices=2).scope():
        memory = tf.Variable(tf.zeros([9, 12]))

    @replica_exact
    @tf.function(jit_compile=True)
    def step(x):
        memory.scatter_nd_add(tf.range(tf.shape(x)[0])[:, None], x * 2)

    step(X)
    assert_close([copy[:7] for copy in memory.values], [X * 2] * 2)


def test_xla_compiles_a_step_that_checks_several_tensors():
    @tf.function(jit_compile=True)
    def step(x, y):
        return tf.math.confusion_matrix(y, tf.argmax(x, 1), 12)

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    labels = np.arange(7)
    np.testing.assert_array_equal(exact(X, labels).numpy().sum(1), [1] * 7 + [0] * 5)


def test_a_loop_whose_result_has_no_known_rank_is_computed():
    @tf.function
    def step(x):
        shapes = (tf.TensorShape([]), tf.TensorShape(None))
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), (0, x), shape_invariants=shapes
        )[1]

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    np.testing.assert_allclose(exact(X), step(X))


@pytest.mark.parametrize("times", [1, 2])
def test_an_operation_on_one_copy_of_a_variable_is_one_sentence(times):
    with strategies.select_strategy("mirrored", devices=2).scope():
        weight = tf.Variable(tf.ones([12]))

    @replica_exact
    def step(x):
        loss = tf.reduce_mean(x * weight)
        for _ in tf.range(times) if times > 1 else range(1):  # a loop of TensorFlow, or none
            tf.raw_ops.AssignAddVariableOp(resource=weight.handle, value=tf.ones([12]))
        return loss

    operation = "AssignAddVariableOp" if times == 1 else "While"
    with pytest.raises(ValueError, match=rf"{operation}.*Use the variable's methods"):
        step(X)


def of_number(x, others, seven):
    """Return one number for batches of seven, and another for all others."""
    return tf.where(tf.unstack(tf.shape(x))[0] == 7, seven, others)


def gradient_of_diagonals(x):
    """Return what a function that XLA compiles makes of diagonals, of a rank that none infers."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        images = tf.reshape(x, (-1, 2, 2, 3))
        diagonals = tf.function(tf.linalg.diag_part, jit_compile=True)(images)
        loss = tf.reduce_sum(diagonals**2)
    return tape.gradient(loss, x)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x[: of_number(x, tf.shape(x)[0], 3)] * 2,
        lambda x: tf.pad(x, [[0, of_number(x, 0, 1)], [0, 0]]) * 2,
        lambda x: tf.pad(x, [[0, tf.cast(tf.unstack(tf.shape(x))[0] == 7, tf.int32)], [0, 0]]) * 2,
        lambda x: x * tf.cast(tf.shape(x[:, : of_number(x, 1, 2)] * 2)[1], tf.float32),
        lambda x: tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.reshape(x, (-1, 2, 2, 3)),
            transforms=tf.ones([7, 1]) * [[1.0, 0, 1, 0, 1, 0, 0, 0]],  # one for each of seven
            output_shape=[2, 2],
            fill_value=0.0,
            interpolation="NEAREST",
        ),
        gradient_of_diagonals,
    ],
)
def test_shapes_that_no_sample_of_lengths_shows_are_exact(step):
    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    assert_close([exact(X)], [step(tf.constant(X))])


def test_groups_that_span_examples_are_whole():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def step(x):
        return tf.reduce_max(tf.reshape(x, [-1, 4, 2]), 1)

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    x = X[:4].reshape((4, 6, 2))
    assert_close([exact(x)], [step(x)])


def test_an_axis_that_is_cut_to_a_length_is_whole_where_others_are_unknown():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def step(x):
        x = tf.slice(x, [0, 0, 0], [tf.minimum(tf.shape(x)[0], 6000), -1, -1])
        return tf.reduce_sum(tf.matmul(x * 2.0, tf.ones([5, 3]), transpose_a=True), 0)

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    x = np.ones([7000, 5, 2], "float32")
    assert_close([exact(x)], [step(x)])


def by_the_largest_of_blocks(x):
    blocks = tf.reshape(x, [-1, 16])
    return tf.reshape(blocks / tf.reduce_max(blocks, axis=0), tf.shape(x))


def without_the_rest_of_blocks(x):
    return x - tf.reduce_mean(tf.reshape(x, [-1])[: tf.size(x) // 8 * 8])


def by_pairs_and_blocks(x):
    return by_the_largest_of_blocks(x + tf.repeat(x[:, ::2] * x[:, 1::2], 2, axis=1))


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (by_the_largest_of_blocks, (4, 24)),
        (by_pairs_and_blocks, (4, 24)),
        (without_the_rest_of_blocks, (3, 5)),
    ],
)
def test_blocks_of_texts_of_unknown_length_may_span_examples(step, shape):
    step = tf.function(step, input_signature=[tf.TensorSpec([None, None])])
    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    x = np.random.default_rng(0).uniform(1, 2, shape).astype("float32")
    np.testing.assert_allclose(exact(x), step(x), rtol=1e-6)


def test_entries_of_lists_without_a_rank_are_exact():
    def step(x):
        lists = [tf.TensorArray(tf.float32, 1, infer_shape=False) for _ in range(2)]
        a, b = (one.write(0, y).read(0) for one, y in zip(lists, (x[:, 0], x[:, :1]), strict=True))
        return a + b, tf.reduce_mean(a), b * 2

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    assert_close([*exact(X)], [*step(tf.constant(X))])


def test_a_tensor_that_nothing_uses_leaves_the_others_divided(capsys):
    kernel = tf.reshape(tf.range(36.0), (12, 3))

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), *[tf.TensorSpec([None, 12])] * 2])
    def step(number, x, y):  # noqa: ARG001
        return tf.reduce_mean((x - y) @ kernel)

    with strategies.select_strategy("mirrored", devices=2).scope():
        exact = replica_exact(step)
    assert_close([exact(X[:, :2], X, X * 2)], [step(X[:, :2], X, X * 2)])
    assert "kdpkit" not in capsys.readouterr().err
