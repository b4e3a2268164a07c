"""Training on replicas writes into no array that the user gave."""

import keras
import numpy as np
import pytest

from kdpkit import strategies, testing
from kdpkit.training import replica_exact

ROWS, BATCH = 48, 16


def placed(values):
    """Copy values to an address that is a multiple of 64, whose memory TensorFlow uses itself."""
    values = np.ascontiguousarray(values)
    memory = np.empty(values.nbytes + 128, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[:] = values
    return array


def arrays():
    x, y = testing.toy_classification(ROWS)
    return placed(x), placed(x[:, :1] + y[:, None].astype("float32"))


class Views(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def regression():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def compiled_on(replicas):
    keras.utils.set_random_seed(0)
    with strategies.select_strategy("mirrored", devices=replicas).scope():
        model = regression()
        model.compile("sgd", "mse")
    return replica_exact(model)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_nothing_is_written_into_what_fit_takes():
    x, y = arrays()
    before = x.copy(), y.copy()
    compiled_on(2).fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_equal((x, y), before)


@pytest.mark.tensorflow
def test_mapped_arrays_and_batches_given_one_by_one_are_not_written_into(tmp_path):
    x, y = arrays()
    mapped = np.memmap(tmp_path / "labels", "float32", "w+", shape=y.shape)
    mapped[:] = y
    mapped.flush()
    x.flags.writeable = False
    model = compiled_on(2)
    model.fit(Views(x, mapped), epochs=2, shuffle=False, verbose=0)
    rows = slice(16, 31)
    model.train_on_batch(x[rows], mapped[rows])
    model.test_on_batch(x[rows], mapped[rows])
    np.testing.assert_array_equal(mapped, y)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "labels", "float32"), y.ravel())


@pytest.mark.jax
def test_buffers_that_jax_takes_over_are_not_the_users():
    x, y = arrays()
    before = x.copy(), y.copy()
    with keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        model = regression()
        model.compile("sgd", "mse")
        replica_exact(model).fit(Views(x, y), epochs=2, shuffle=False, verbose=0)
    np.testing.assert_equal((x, y), before)
