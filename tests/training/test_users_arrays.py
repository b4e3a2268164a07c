"""Training on replicas writes into no array that the user gave."""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from kdpkit import strategies, testing
from kdpkit.training import TrainingLoop, replica_exact
from tests.training.exactness import ON_JAX

ROWS, BATCH = 48, 16


def placed(values, offset):
    """Copy values to an address that is this far from a multiple of 64."""
    values = np.ascontiguousarray(values)
    memory = np.empty(values.nbytes + 128, "uint8")
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[:] = values
    return array


def arrays(offset=0):
    x, y = testing.toy_classification(ROWS)
    return placed(x, offset), placed(x[:, :1] + y[:, None].astype("float32"), offset)


class Views(keras.utils.PyDataset):
    """Gives views of arrays as batches."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def generator(x, y):
    views = Views(x, y)
    return (views[index % len(views)] for index in range(2 * len(views)))


def from_generator(x, y):
    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    views = Views(x, y)
    batches = lambda: (views[index] for index in range(len(views)))  # noqa: E731  # one line
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(views)))


KINDS = {
    "PyDataset": Views,
    "generator": generator,
    "from_generator": from_generator,
    "nested": lambda x, y: from_generator(x, y).map(lambda x, y: (x, y)).prefetch(1),
    "slices": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
    "tensors": lambda x, y: tf.data.Dataset.from_tensors((x, y)),
    "arrays": lambda x, y: (x, y),
}


def regression():
    layers = [keras.Input((4,)), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def compiled_on(replicas, loss="mse"):
    keras.utils.set_random_seed(0)
    with strategies.select_strategy("mirrored", devices=replicas).scope():
        model = regression()
        model.compile("sgd", loss)
    return replica_exact(model)


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_into_what_fit_takes(kind):
    x, y = arrays()
    before = x.copy(), y.copy()
    data = KINDS[kind](x, y)
    model = compiled_on(2)
    given, labels = data if isinstance(data, tuple) else (data, None)
    steps = ROWS // BATCH if kind == "generator" else None
    size = {"batch_size": BATCH} if labels is not None else {}
    settings = {"steps_per_epoch": steps, "shuffle": False, "verbose": 0}
    model.fit(given, labels, epochs=2, **settings, **size)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


@pytest.mark.tensorflow
@pytest.mark.exhaustive
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    offset=st.sampled_from([0, 4, 32, 64]),
    kind=st.sampled_from([kind for kind in KINDS if kind != "generator"]),
    loss=st.sampled_from(["mse", "mae", "binary_crossentropy", "huber"]),
    replicas=st.sampled_from([1, 2, 4]),
    entrance=st.sampled_from(["fit", "evaluate", "predict", "loop"]),
)
def test_nothing_is_written_by_any_way_in(offset, kind, loss, replicas, entrance):
    x, y = arrays(offset)
    before = x.copy(), y.copy()
    data = KINDS[kind](x, y)
    model = compiled_on(replicas, loss)
    if entrance == "loop" and isinstance(data, tf.data.Dataset):
        TrainingLoop(model, optimizer="sgd", loss=loss).fit(data, epochs=2, verbose=0)
    elif entrance == "predict":
        model.predict(x if isinstance(data, tuple) else data, verbose=0)
    else:
        given = data if isinstance(data, tuple) else (data,)
        size = {"batch_size": BATCH} if len(given) == 2 else {}
        getattr(model, "fit" if entrance == "loop" else entrance)(*given, verbose=0, **size)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


@pytest.mark.tensorflow
@pytest.mark.parametrize("replicas", [2, 4])
def test_batches_given_one_by_one_are_not_written_into(replicas):
    x, y = arrays()
    before = y.copy()
    model = compiled_on(replicas)
    for rows in (slice(0, 16), slice(16, 31)):
        model.train_on_batch(x[rows], y[rows])
        model.test_on_batch(x[rows], y[rows])
    np.testing.assert_array_equal(y, before)


@pytest.mark.tensorflow
def test_read_only_and_mapped_arrays_are_trained_on(tmp_path):
    x, y = arrays()
    mapped = np.memmap(tmp_path / "labels", "float32", "w+", shape=y.shape)
    mapped[:] = y
    mapped.flush()
    x.flags.writeable = False
    compiled_on(2).fit(Views(x, mapped), epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(mapped, y)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "labels", "float32"), y.ravel())


@pytest.mark.tensorflow
def test_epochs_on_views_train_what_one_device_trains():
    def weights(replicas):
        keras.utils.set_random_seed(0)
        model = compiled_on(replicas)
        model.fit(Views(*arrays()), epochs=3, shuffle=False, verbose=0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    np.testing.assert_allclose(weights(2), weights(1), atol=1e-6)


@pytest.mark.jax
def test_buffers_that_jax_takes_over_are_not_the_users():
    assert ON_JAX
    x, y = arrays()
    before = x.copy(), y.copy()
    with keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        model = regression()
        model.compile("sgd", "mse")
        replica_exact(model).fit(Views(x, y), epochs=2, shuffle=False, verbose=0)
        loop = TrainingLoop(regression(), optimizer="sgd", loss="mse")
        loop.fit(Views(x, y), epochs=2, verbose=0)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
