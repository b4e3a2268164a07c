"""A step that is traced whole, and written again for the devices that share its examples."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from kdpkit.training import replica_exact
from tests.training.exactness import scopes
from tests.training.one_graph import DividedStep, differing

pytestmark = pytest.mark.tensorflow
# The law of every tensor, of whole models.


def convolutions():
    first = layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()
    then = layers.MaxPooling2D(), layers.DepthwiseConv2D(2), layers.Flatten()
    return [keras.Input((8, 8, 3)), *first, *then, layers.Dropout(0.2), layers.Dense(5)]


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    return keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))


def recurrent_both_ways():
    tokens = layers.Embedding(50, 8, mask_zero=True)
    both = layers.Bidirectional(layers.LSTM(4, return_sequences=True))
    last = layers.GRU(8, recurrent_dropout=0.2)
    return [keras.Input((None,), dtype="int32"), tokens, both, last, layers.Dense(5)]


MODELS = {make.__name__: make for make in (convolutions, attention, recurrent_both_ways)}


def trained(name, replicas):
    random = np.random.default_rng(0)
    y = random.integers(0, 5, 11).astype("int32")
    if name == "convolutions":
        x = random.normal(size=(11, 8, 8, 3)).astype("float32")
    else:
        x = random.integers(0, 50, (11, 6)).astype("int32")
    keras.utils.set_random_seed(0)
    with scopes(replicas)[0]:
        made = MODELS[name]()
        model = replica_exact(keras.Sequential(made) if isinstance(made, list) else made)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.fit(x, y, batch_size=11, verbose=0)
    return model, x, y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_tensor_of_a_step_equals_one_devices(name, replicas):
    model, x, y = trained(name, replicas)
    step = DividedStep.of_model(model, (tf.constant(x), tf.constant(y)))
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [np.array(v) for v in variables]
    assert not step.whole & {"MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropFilter"}
    assert not step.whole & {"While", "StatelessWhile"}
    for count in (11, 2, 1):
        found = []
        for run in (step.on_one_device, step.divided):
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            found.append(run((x[:count], y[:count])))
        assert len(found[0]) > 100
        assert not differing(*found)


def looped(function, *before):
    """Return what three calls make of variables of a loop; the last one is returned."""
    return tf.while_loop(lambda i, *_: i < 3, lambda i, *x: (i + 1, *function(*x)), (0, *before))[
        -1
    ]


def either(x, function):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: function(x), lambda: function(x * 2))


def compiled(function, x):
    return tf.function(function, jit_compile=True)(x)


@tf.custom_gradient
def with_own_gradient(x, y):
    return (x, y + 1), lambda *upstream: tuple(gradient * 3 for gradient in upstream)


def listed(x):
    """Return a list of parts of each example."""
    entries = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False)
    return tf.while_loop(
        lambda i, _: i < 4, lambda i, a: (i + 1, a.write(i, x[:, i])), (0, entries)
    )[1]


def swapped(x, size):
    """Return parts of each example in the other order."""
    first, second = tf.split(x, [size, 4 - size], 1)
    return tf.reshape(tf.concat([second, first * 2], 1), (-1, 4, 4, 3))


def regrouped(x, size):
    """Return the entries of groups over their sum."""
    return tf.reshape(tf.nn.softmax(tf.reshape(x, (-1, size))), (-1, 4, 4, 3))


# The law of every rule: a function of a batch is the same, and is divided.

TABLE = tf.reshape(tf.range(12.0), (4, 3))
KERNEL = tf.reshape(tf.range(36.0), (2, 2, 3, 3)) / 36
DIVIDED = {
    "sum of the others": lambda x: tf.reduce_sum(x, [1, 3]),
    "sum": lambda x: tf.reduce_sum(x, 0),
    "mean": lambda x: tf.reduce_mean(x, [0, 2]),
    "largest of the others": lambda x: tf.reduce_max(x, [1, 2, 3], keepdims=True),
    "broadcast": lambda x: x * TABLE[0] + tf.reduce_sum(x, 3, keepdims=True),
    "rows": lambda x: tf.reshape(x, (-1, 3)) @ TABLE[:3],
    "product of rows": lambda x: tf.linalg.matmul(
        tf.reshape(x, (-1, 3)), tf.reshape(x, (-1, 3)), transpose_a=True
    ),
    "product of batches": lambda x: tf.matmul(x, x, transpose_b=True),
    "einsum": lambda x: tf.einsum("nhwc,cd->nhwd", x, TABLE[:3]),
    "einsum over examples": lambda x: tf.einsum("nhwc,nhwd->cd", x, x),
    "convolution": lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"),
    "pooling": lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "softmax": lambda x: tf.nn.softmax(x),
    "bands": lambda x: tf.linalg.band_part(x, 1, 0),
    "bands of another axis": lambda x: tf.linalg.band_part(tf.transpose(x, (1, 0, 2, 3)), 0, -1),
    "band of a sum": lambda x: tf.linalg.band_part(tf.reduce_sum(x, [0, 1]), 0, 1),
    "transposed": lambda x: tf.transpose(x, (3, 1, 0, 2)) * 2,
    "another axis": lambda x: tf.reduce_sum(tf.transpose(x, (1, 0, 2, 3)), 0),
    "expanded": lambda x: tf.squeeze(tf.expand_dims(x, 1), [1]) * 2,
    "stacked": lambda x: tf.stack([x, x * 2], 1),
    "unstacked": lambda x: tf.unstack(x, axis=2)[1] * 2,
    "side by side": lambda x: tf.concat([x, x * 2], -1),
    "split": lambda x: tf.split(x, 3, -1)[1] * 2,
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 0], [0, 0], [0, 2]]) * 2,
    "slice": lambda x: x[:, 1:, 0, ::-1] * 2,
    "new axis": lambda x: x[:, tf.newaxis, 1] * 2,
    "last of each": lambda x: x[..., 0] * 2,
    "others of each": lambda x: x[:, ..., tf.newaxis, 1, ::2] * 2,
    "of an axis before": lambda x: tf.transpose(x, (1, 0, 2, 3))[1, ..., :2] * 2,
    "rolled windows": lambda x: tf.roll(x, [1, 2], [1, 2]) * 2,
    "diagonals": lambda x: tf.linalg.diag(tf.linalg.diag_part(x)) * 2,
    "waves": lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64))) * 2,
    "a gradient of its own": lambda x: with_own_gradient(x, x[:, :1])[1] * 2,
    "moved images": lambda x: (
        tf.raw_ops.ImageProjectiveTransformV3(
            images=x,
            transforms=tf.reshape(x, (-1, 48))[:, :8] / 9 + [1.0, 0, 0, 0, 1, 0, 0, 0],
            output_shape=[4, 4],
            fill_value=0.0,
            interpolation="BILINEAR",
        )
        * 2
    ),
    "softmax of another axis": lambda x: tf.nn.softmax(x, 1),
    "einsum of others": lambda x: tf.einsum("...wc,cd->...wd", x, TABLE[:3]),
    "einsum of all others": lambda x: tf.einsum("n...c,n...c->nc...", x, x),
    "one for all": lambda x: tf.tile(tf.ones((1, 1, 1, 1)), tf.shape(x)) * x,
    "padded to a size": lambda x: (
        tf.pad(x, [[0, tf.shape(x)[0] - tf.shape(x)[0]], [0, 6 - tf.shape(x)[1]], [0, 0], [0, 0]])
        * 2
    ),
    "cut to sizes": lambda x: tf.slice(x, [0, 1, 0, 0], [tf.shape(x)[0], 2, -1, -1]) * 2,
    "up to the last": lambda x: x[: tf.shape(x)[0], -1] * 2,
    "last by its number": lambda x: tf.gather(x, [0, tf.shape(x)[1] - 1], axis=1) * 2,
    "chosen": lambda x: tf.raw_ops.Select(condition=x > 0, x=x, y=-x),
    "chosen examples": lambda x: tf.raw_ops.Select(condition=x[:, 0, 0, 0] > 0, x=x, y=-x),
    "of a shape": lambda x: tf.ensure_shape(x, (None, 4, 4, 3)) * 2,
    "compiled": lambda x: compiled(lambda y: tf.nn.conv2d(y, KERNEL, 1, "SAME"), x),
    "grouped convolution": lambda x: keras.ops.conv(x, KERNEL[:, :, :1], padding="same"),
    "compiled sum": lambda x: compiled(lambda y: tf.reduce_sum(y, 0), x),
    "images moved alike": lambda x: (
        tf.raw_ops.ImageProjectiveTransformV3(
            images=x,
            transforms=[[1.0, 0, 1, 0, 1, 0, 0, 0]],
            output_shape=[4, 4],
            fill_value=0.0,
            interpolation="NEAREST",
        )
        * 2
    ),
    "looked up": lambda x: tf.gather(TABLE, tf.cast(x[:, 0, 0] > 0, tf.int32)),
    "looked up in each": lambda x: tf.gather(x, [2, 0], axis=3) * 2,
    "largest position": lambda x: tf.argmax(x, -1) * 2,
    "running total": lambda x: tf.cumsum(x, 2),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 3),
    "tiled": lambda x: tf.tile(x, [1, 2, 1, 1]) * 2,
    "filled": lambda x: tf.fill(tf.shape(x), 2.0) * x,
    "repeated": lambda x: tf.repeat(x, 2, axis=1) * 2,
    "sum in a loop": lambda x: looped(
        lambda y, z: (y, z + tf.reduce_sum(y, 0)), x, tf.zeros((4, 4, 3))
    ),
    "loop": lambda x: looped(lambda y: (y + tf.reduce_sum(y, 3, keepdims=True) / 9,), x),
    "random numbers": lambda x: x * tf.random.stateless_uniform(tf.shape(x), [1, 2]),
    "numbers of a loop": lambda x: x * tf.map_fn(lambda i: i * i, tf.range(3.0)),
    "list without entries": lambda x: x + tf.TensorArray(tf.float32, 3, element_shape=[]).stack(),
    "length of a list": lambda x: x * tf.cast(listed(x).size(), tf.float32),
}
WHOLE = {
    "compiled, of all examples": lambda x: compiled(lambda y: y - tf.reduce_mean(y, 0), x),
    "cut to five": lambda x: (
        tf.slice(x, [0, 0, 0, 0], [tf.minimum(tf.shape(x)[0], 5), -1, -1, -1]) * 2
    ),
    "all but the first of the last axis": lambda x: tf.transpose(x[:, 0, 0])[..., 1:] * 2,
    "one of the last axis": lambda x: tf.transpose(x[:, 0, 0])[..., 0] * 2,
    "backwards": lambda x: x[::-1] * 2,
    "all but the first": lambda x: x[1:] * 2,
    "running total of examples": lambda x: tf.cumsum(x, 0),
    "softmax over examples": lambda x: tf.nn.softmax(x, 0),
    "band with a row of each": lambda x: tf.linalg.band_part(x[:, 0, 0], 0, -1),
    "band with a column of each": lambda x: tf.linalg.band_part(tf.transpose(x[:, 0, 0]), 1, 0),
    "twice": lambda x: tf.concat([x, x], 0) * 2,
    "similarities": lambda x: (
        tf.reshape(x, (tf.shape(x)[0], -1)) @ tf.transpose(tf.reshape(x, (tf.shape(x)[0], -1)))
    ),
    "sorted": lambda x: tf.sort(x, 0),
    "padded before": lambda x: tf.pad(x, [[1, 0], [0, 0], [0, 0], [0, 0]]) * 2,
    "where": lambda x: tf.boolean_mask(x, x[:, 0, 0, 0] > 0) * 2,
    "numbers of examples": lambda x: tf.cast(tf.range(tf.shape(x)[0]), tf.float32),
    "mean in a loop": lambda x: looped(
        lambda y, z: (y, z + tf.reduce_mean(y, 0)), x, tf.zeros((4, 4, 3))
    ),
    "sizes in a loop": lambda x: looped(lambda y: (y * tf.shape(y)[0],), tf.cast(x * 9, tf.int32)),
    "a length in a loop": lambda x: looped(
        lambda y: (y + tf.reduce_sum(y[:, :, : tf.shape(y)[0] % 3 + 1], 2, keepdims=True),), x
    ),
    "divided at a length in a loop": lambda x: looped(
        lambda y: (swapped(y, tf.shape(y)[0] % 3),), x
    ),
    "padded with a length in a loop": lambda x: looped(
        lambda y: (
            tf.pad(y[:, 1:], [[0, 0], [0, 1], [0, 0], [0, 0]], constant_values=tf.shape(y)[0]),
        ),
        tf.cast(x * 9, tf.int32),
    ),
    "a remainder in a loop": lambda x: looped(
        lambda y: (regrouped(y, (tf.shape(y)[0] % 3 + 1) * 4),), x
    ),
    "a remainder in a condition": lambda x: either(
        x, lambda y: regrouped(y, tf.minimum(tf.shape(y)[0], 2) * 4)
    ),
    "as many entries as a remainder": lambda x: (
        x * tf.cast(tf.shape(tf.concat([x[:, : tf.shape(x)[0] % 3 + 1], x], 1))[1], tf.float32)
    ),
    "entries of a list": lambda x: listed(x).gather([2, 0]),
    "scattered into a list": lambda x: (
        tf.TensorArray(tf.float32, 4).scatter([3, 1, 0, 2], tf.transpose(x, (1, 0, 2, 3))).stack()
    ),
    "sum used in a loop": lambda x: looped(lambda y: (y + tf.reduce_sum(y, 0) / 9,), x),
    "sum squared in a loop": lambda x: looped(
        lambda y, z: (y, z * z / 9 + tf.reduce_sum(y, 0)), x, tf.zeros((4, 4, 3))
    ),
    "mean in a condition": lambda x: either(x, lambda y: tf.reduce_mean(y, 0)),
    "size in a condition": lambda x: either(x, lambda y: (y, tf.shape(y)[0]))[1],
    "counted": lambda x: tf.reduce_sum(x, 0) / tf.cast(tf.shape(x)[0], tf.float32),
    "of one label": lambda x: tf.unique(tf.cast(x[:, 0, 0, 0] > 0, tf.int32)).y,
    "segments": lambda x: tf.math.unsorted_segment_mean(x, tf.range(tf.shape(x)[0]) % 2, 2),
    "scattered": lambda x: tf.scatter_nd(tf.range(tf.shape(x)[0])[:, None] * 2, x, (19, 4, 4, 3)),
    "updated": lambda x: tf.tensor_scatter_nd_update(x, [[0]], tf.ones([1, 4, 4, 3])),
    "mapped": lambda x: tf.map_fn(lambda one: one / tf.reduce_max(one), x),
    "vectorized": lambda x: tf.vectorized_map(lambda one: one / tf.reduce_max(one), x),
    "scanned": lambda x: tf.scan(lambda a, one: a / 2 + one, x),
    "partitioned": lambda x: tf.dynamic_partition(x, tf.cast(x[:, 0, 0, 0] > 0, tf.int32), 2)[1],
    "rolled": lambda x: tf.roll(x, 1, 0),
    "statistics": lambda x: tf.nn.moments(x, 0)[1],
    "normalized over examples": lambda x: tf.nn.l2_normalize(x, 0),
    "distances": lambda x: tf.norm(x[:, None, 0, 0] - x[None, :, 0, 0], axis=-1),
    "counted values": lambda x: tf.histogram_fixed_width(x, [-1.0, 1.0], 5),
    "determinants": lambda x: tf.linalg.det(x[:, :, :, 0]) + tf.linalg.trace(x[:, :, :, 0]),
    "sum or mean": lambda x: tf.cond(
        tf.shape(x)[0] > 5, lambda: tf.reduce_sum(x, 0), lambda: tf.reduce_mean(x, 0)
    ),
    "condition of all": lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x * 2, lambda: -x),
    "loop to a tolerance": lambda x: tf.while_loop(
        lambda a: tf.reduce_sum(tf.abs(a)) > 1, lambda a: [a / 2], [x]
    )[0],
    "loop over examples": lambda x: tf.foldl(lambda a, one: a * 0.9 + one, x),
    "in NumPy": lambda x: tf.ensure_shape(
        tf.numpy_function(lambda a: a - a.mean(0), [x], tf.float32), x.shape
    ),
    "halves": lambda x: tf.subtract(*tf.split(tf.concat([x, x * 2], 0), 2, 0)),
    "every second": lambda x: tf.reshape(tf.stack([x, x + 1], 1), (-1, 4, 4, 3))[::2],
    "a matrix of its length": lambda x: tf.eye(tf.shape(x)[0]) @ x[:, 0, 0],
    "einsum of all with all": lambda x: tf.einsum("nhwc,mhwc->nm", x, x),
    "normalized over both axes": lambda x: (
        x / tf.reduce_sum(x, 0, keepdims=True) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "diagonal": lambda x: tf.linalg.diag_part(x[:, 0, 0] @ tf.transpose(x[:, 0, 0])),
    "random numbers of the last axis": lambda x: (
        tf.random.stateless_uniform([3, tf.shape(x)[0]], [1, 2]) + tf.transpose(x[:, 0, 0])
    ),
    "padded to an even length": lambda x: (
        tf.pad(x[:, 0, 0], [[0, tf.shape(x)[0] % 2], [0, 0]]) @ TABLE[:3]
    ),
    "of eight or more": lambda x: tf.zeros([tf.maximum(tf.shape(x)[0], 8), 3]) + 1,
    "the first five": lambda x: x[:5] * 2,
    "contrast over examples": lambda x: tf.image.adjust_contrast(x[:, 0], 2.0),
    "mean of integers": lambda x: tf.reduce_mean(tf.cast(x * 9, tf.int32), 0),
    "squeezed": lambda x: tf.squeeze(x[:, :1, :1, :1]) * 2,
    "shuffled": lambda x: tf.gather(
        x, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), [1, 2])
    ),
    "looked up in the last": lambda x: tf.gather(
        x[:, 0, 0], tf.range(tf.shape(x)[0])[:, None] % 3, axis=1, batch_dims=1
    ),
    "mixed with others": lambda x: x * 0.7 + tf.reverse(x, [0]) * 0.3,
    "rounded": lambda x: tf.quantization.fake_quant_with_min_max_vars(
        x, tf.reduce_min(x), tf.reduce_max(x)
    ),
}
FUNCTIONS = DIVIDED | WHOLE


@functools.lru_cache(maxsize=2)
def divided(name, replicas):
    return DividedStep(FUNCTIONS[name], tf.zeros((1, 4, 4, 3)), replicas)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=6)
@given(count=st.integers(1, 9), replicas=st.sampled_from([2, 3]), seed=st.integers(0, 9))
def test_a_function_of_parts_is_that_of_all(name, count, replicas, seed):
    batch = np.random.default_rng(seed).normal(size=(count, 4, 4, 3)).astype("float32")
    step = divided(name, replicas)
    many = step.divided(batch)
    assert not differing(step.on_one_device(batch), many)
    expected = tf.nest.flatten(FUNCTIONS[name](tf.constant(batch)))
    for found, value in zip(step.returned(many), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
    if name in DIVIDED:
        assert not step.whole


@pytest.mark.parametrize("name", ["random numbers", "rows", "loop", "sum", "twice"])
def test_an_empty_batch_is_computed_as_on_one_device(name):
    step, batch = divided(name, 3), np.zeros((2, 4, 4, 3), "float32")
    for count in (2, 1, 0):  # The last one is computed by a function of any length.
        assert not differing(step.on_one_device(batch[:count]), step.divided(batch[:count]))


def test_padded_batches_of_a_program_that_takes_pairs_only_are_computed_whole():
    def padded(x):
        first, second = tf.split(x, 2, 0)
        return first - second, tf.pad(x[:, 0, 0], [[0, -tf.shape(x)[0] % 4], [0, 0]]) @ TABLE[:3]

    step, batch = DividedStep(padded, tf.zeros((2, 4, 4, 3)), 2), np.ones((6, 4, 4, 3), "float32")
    found = step.divided(batch)
    assert not differing(step.on_one_device(batch), found)
    assert step.returned(found)[1].shape == (8, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"contrast over examples"}))  # has none
def test_gradients_of_parts_are_those_of_all(name):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cast(FUNCTIONS[name](x), tf.float32)
            loss = tf.reduce_sum(y * y)
        found = tape.gradient(loss, x)
        return loss if found is None else found

    batch = np.random.default_rng(0).normal(size=(7, 4, 4, 3)).astype("float32")
    step = DividedStep(gradient, tf.constant(batch), 3)
    assert not differing(step.on_one_device(batch), step.divided(batch))
