"""The Keras guide's loop on JAX beside ours, on its own model and data flow.

tests/test_environments.py runs it there.
"""

import jax
import keras
import numpy as np
import pytest

from kdpkit import corpora, sharding
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop
from tests.training.jax_guide import GuideLoop

pytestmark = [pytest.mark.jax, pytest.mark.slow]
BATCH, ROWS = 32, 160


def build():
    """The guide's convnet, with one regularizer, which its loop would not see."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(12, 3, padding="same", use_bias=False),
            layers.BatchNormalization(scale=False),
            layers.ReLU(),
            layers.Conv2D(24, 6, strides=2, use_bias=False),
            layers.BatchNormalization(scale=False),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(64, activation="relu", kernel_regularizer="l2"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    # Not the guide's Adam, which turns the rounding of gradients near zero into steps.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data():
    images, labels = corpora.digits().train
    return images[:ROWS].astype("float32"), labels[:ROWS]


def batches():
    x, y = data()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]


def on_one_device():
    model, optimizer, loss = build()
    model.compile(optimizer, loss)
    model.fit(*data(), batch_size=BATCH, shuffle=False, epochs=1, verbose=0)
    return model, optimizer


def change(model):
    """How far a model is from the one that one device trains, over how far training moved it."""
    expected, start = on_one_device()[0], build()[0]
    weights = zip(
        model.trainable_variables,
        expected.trainable_variables,
        start.trainable_variables,
        strict=True,
    )
    pairs = [(np.abs(w - e).max(), np.abs(e - s).max()) for w, e, s in _values(weights)]
    return max(off for off, _ in pairs) / max(moved for _, moved in pairs)


def _values(groups):
    return [[np.asarray(variable.value) for variable in group] for group in groups]


@pytest.mark.needs(jax="0.8", reason="`jax.device_put` takes Keras' variables")
def test_as_published_it_does_not_start():
    model, optimizer, loss = build()
    with pytest.raises(ValueError, match="__jax_array__"):
        GuideLoop(model, optimizer, loss, jax.devices(), as_published=True)


def test_mended_it_trains_something_else_and_forgets_the_optimizer():
    model, optimizer, loss = build()
    guide = GuideLoop(model, optimizer, loss, jax.devices())
    guide.train(batches())
    guide.write_back()
    assert change(model) > 1e-2
    assert int(optimizer.iterations.value) == 0


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_ours_is_one_device_and_writes_everything_back(devices):
    model, optimizer, loss = build()
    loop = TrainingLoop(model, optimizer=optimizer, loss=loss, strategy=sharding.data_mesh(devices))
    loop.fit(ArrayBatches(data(), global_batch_size=BATCH), epochs=1, verbose=0)
    assert change(model) <= 1e-5
    expected, of_expected = on_one_device()
    for one, other in _values(zip(optimizer.variables, of_expected.variables, strict=True)):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for one, other in _values(
        zip(model.non_trainable_variables, expected.non_trainable_variables, strict=True)
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_so_is_the_step_that_one_can_build_a_loop_from(devices):
    model, optimizer, loss = build()
    mesh = sharding.data_mesh(devices)
    state = sharding.TrainState.replicated(model, optimizer, mesh)
    step = sharding.make_train_step(model, optimizer, loss)
    for batch in batches():
        state, _ = step(state, sharding.shard_batch(batch, mesh))
    state.write_back(model, optimizer)
    assert change(model) <= 1e-5
    assert int(optimizer.iterations.value) == len(batches())
