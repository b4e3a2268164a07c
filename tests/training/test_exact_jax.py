"""`replica_exact` and `TrainingLoop` on JAX beside Keras on one device.

tests/test_environments.py runs it there.
"""

import functools
import itertools
import re

import jax
import keras
import numpy as np
import pytest

from kdpkit import sharding, testing
from kdpkit.training import TrainingLoop, replica_exact
from tests.training import exactness

pytestmark = pytest.mark.jax
SETTINGS = {setting.name: setting for setting in exactness.SETTINGS}
# What the backends do differently; `python -m tests.training.exactness` measures all.
TELLING = [
    "last batch of one example: replicas without examples",
    "first batch no multiple of the replicas",
    "BatchNormalization, replicas without examples",
    "Dropout",
    "global_clipnorm",
    "gradient_accumulation_steps with a schedule and clipping",
    "ema_overwrite_frequency",
    "optimizer Muon",
    "mixed_float16, overflow on the last replica",
    "reduction='mean_with_sample_weight'",
    "a loss of the global batch (Dice)",
    "regularizers of weights, biases and activities",
    "several outputs with loss_weights",
    "sparse features",
    "Embedding(mask_zero=True) and LSTM, a loss for every token",
    "steps_per_execution=2",
    "Python generator",
    "validation, evaluate and predict, uneven",
]
X, Y = testing.toy_classification(11)


def data_parallel(devices):
    return keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(devices)])


def net():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "column"), exactness.cells(TELLING, ["replica_exact on JAX", "TrainingLoop on JAX"])
)
def test_settings_keep_their_promise(name, column):
    outcome = exactness.measure(SETTINGS[name], column, 4, rows=exactness.UNEVEN)
    assert outcome.verdict == SETTINGS[name].promise_in(column), outcome


@pytest.mark.slow
def test_keras_alone_fails_where_the_devices_do_not_divide_the_batch():
    name = "first batch no multiple of the replicas"
    stock = exactness.measure_apart("stock Keras on JAX", 2, [name])[name]
    assert stock.verdict == "crash"
    assert re.search("partitioned 2 times|divisible by 2", stock.message)


@pytest.mark.parametrize("exact", [True, False], ids=["replica_exact", "Keras alone"])
@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("devices", [1, 2])
def test_weights_stay_when_evaluation_fails(devices, method, exact):
    wrong = np.ones((4, 7), "float32")
    with data_parallel(devices).scope():
        model = replica_exact(net()) if exact else net()
        model.fit(X[:4], Y[:4], verbose=0)
        before = model.get_weights()
        with pytest.raises(ValueError, match="incompatible"):
            getattr(model, method)(
                *([wrong, Y[:4]] if method == "evaluate" else [wrong]), verbose=0
            )
        if exact:
            for one, other in zip(model.get_weights(), before, strict=True):
                np.testing.assert_array_equal(one, other)
            model.fit(X, Y, verbose=0)
        else:
            assert model.weights[0]._value is None  # the reason for all this


class Failing(keras.utils.PyDataset):
    """Has two batches, then an error."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise OSError("the disk is gone")
        return X[:4], Y[:4]


@pytest.mark.parametrize("train", ["fit", "loop"])
def test_an_error_in_the_data_leaves_what_was_learned(train):
    with data_parallel(2).scope():
        model = replica_exact(net())
        expected = replica_exact(net())
        for _ in range(2):
            expected.train_on_batch(X[:4], Y[:4])
        if train == "loop":
            loop = TrainingLoop(model, optimizer=model.optimizer, loss=model.loss)
            fit = functools.partial(loop.fit, epochs=1)
        else:
            fit = functools.partial(model.fit, shuffle=False)
        with pytest.raises(OSError, match="the disk is gone"):
            fit(Failing(), verbose=0)
        for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_model_of_another_distribution_raises():
    model = net()
    with data_parallel(2).scope(), pytest.raises(ValueError, match="before the distribution"):
        replica_exact(model)


def test_calling_it_twice_changes_nothing_more():
    with data_parallel(2).scope():
        model = replica_exact(net())
        step = model.train_step
        assert replica_exact(model).train_step is step


# What a loop takes and returns.


class Batches(keras.utils.PyDataset):
    """Batches of four examples, the last one of three."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        part = slice(4 * index, 4 * index + 4)
        return X[part], Y[part]


def generator():
    for index in itertools.count():
        yield Batches()[index % 3]


@pytest.mark.parametrize(
    ("batches", "steps"), [(Batches, None), (generator, 3), (lambda: Batches(workers=2), None)]
)
def test_a_loop_takes_what_keras_fit_takes(batches, steps):
    model = net()
    expected = model.fit(Batches(), epochs=2, shuffle=False, verbose=0).history
    ours = net()
    loop = TrainingLoop(
        ours, optimizer="sgd", loss=ours.loss, strategy=sharding.data_mesh(3), steps_per_loop=2
    )
    history = loop.fit(batches(), epochs=2, steps_per_epoch=steps, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for one, other in zip(ours.variables, model.variables, strict=True):
        np.testing.assert_allclose(one.value, other.value, atol=1e-6)


def test_callbacks_read_and_change_what_the_next_step_goes_on_from():
    model = net()
    seen = []

    class Doubling(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 a method's arguments
            seen.append(float(np.sum(model.weights[0])))  # the model itself, not `self.model`
            model.weights[0].assign(2 * model.weights[0])
            model.optimizer.learning_rate = 0.0

    start = float(np.sum(model.weights[0]))
    loop = TrainingLoop(model, optimizer="sgd", loss=model.loss, strategy=sharding.data_mesh(2))
    loop.fit(Batches(), epochs=1, callbacks=[Doubling()], verbose=0)
    assert seen[0] != start
    assert seen[1:] == pytest.approx([2 * seen[0], 4 * seen[0]])


def test_freezing_a_layer_between_fits_is_heeded():
    model = net()
    loop = TrainingLoop(model, optimizer="sgd", loss=model.loss, strategy=sharding.data_mesh(2))
    loop.fit(Batches(), epochs=1, verbose=0)
    model.layers[0].trainable = False
    before = np.array(model.layers[0].kernel)
    head = np.array(model.layers[-1].kernel)
    loop = TrainingLoop(model, optimizer="sgd", loss=model.loss, strategy=sharding.data_mesh(2))
    loop.fit(Batches(), epochs=1, verbose=0)
    np.testing.assert_array_equal(model.layers[0].kernel, before)
    assert np.abs(np.array(model.layers[-1].kernel) - head).max() > 0


def test_arrays_are_no_batches():
    loop = TrainingLoop(net(), optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="`train` must give batches, and is a tuple"):
        loop.fit((X, Y), epochs=1)


def test_text_raises():
    class Words(Batches):
        def __getitem__(self, index):
            return np.array(["a", "b"]), Y[:2]

    loop = TrainingLoop(net(), optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="gives text, and JAX has numbers alone"):
        loop.fit(Words(), epochs=1)


def test_variables_lie_on_every_device_after_training():
    model = net()
    loop = TrainingLoop(model, optimizer="adam", loss=model.loss, strategy=sharding.data_mesh(4))
    loop.fit(Batches(), epochs=1, verbose=0)
    for variable in model.variables + model.optimizer.variables:
        assert variable.value.sharding.device_set == set(jax.devices()[:4])
        assert variable.value.sharding.is_fully_replicated


def test_a_model_keeps_its_devices_where_the_distribution_is_no_longer_set():
    with data_parallel(8).scope():
        model = replica_exact(net())
        model.fit(X, Y, batch_size=9, verbose=0)
        inside = model.predict(X, verbose=0)
        evaluated = model.evaluate(X, Y, verbose=0)
    np.testing.assert_array_equal(model.predict(X, verbose=0), inside)
    assert model.evaluate(X, Y, verbose=0) == evaluated
