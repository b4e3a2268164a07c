"""The Keras guide's loop on JAX beside ours, on its own model and data flow.

tests/test_environments.py runs it there.
"""

import functools

import jax
import keras
import numpy as np
import pytest

from kdpkit import corpora, sharding
from kdpkit.batches import ArrayBatches
from kdpkit.training import TrainingLoop
from tests.training.jax_guide import GuideLoop

pytestmark = [pytest.mark.jax, pytest.mark.slow]
BATCH, EXAMPLES = 32, 160


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
    images, labels = corpora.load_images().train
    return images[:EXAMPLES].astype("float32"), labels[:EXAMPLES]


def batches():
    x, y = data()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, EXAMPLES, BATCH)]


def arrays(variables):
    return [np.array(variable.value) for variable in variables]


@functools.cache
def on_one_device():
    """Train on one device; return weights, statistics and the optimizer's state."""
    model, optimizer, loss = build()
    model.compile(optimizer, loss)
    model.fit(*data(), batch_size=BATCH, shuffle=False, epochs=1, verbose=0)
    return [
        arrays(part)
        for part in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]


def change(model):
    """How far a model is from the one that one device trains, over how far training moved it."""
    start, (expected, *_) = arrays(build()[0].trainable_variables), on_one_device()

    def largest(one, other):
        return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))

    return largest(arrays(model.trainable_variables), expected) / largest(expected, start)


@pytest.mark.needs(jax="0.8", reason="`jax.device_put` takes Keras' variables")
def test_as_published_it_does_not_start():
    model, optimizer, loss = build()
    with pytest.raises(ValueError, match="__jax_array__"):
        GuideLoop(model, optimizer, loss, jax.devices(), as_published=True)


def test_fixed_it_trains_something_else_and_forgets_the_optimizer():
    model, optimizer, loss = build()
    guide = GuideLoop(model, optimizer, loss, jax.devices())
    guide.train(batches())
    guide.write_back()
    assert change(model) > 1e-2
    assert int(optimizer.iterations.value) == 0


@pytest.mark.parametrize("devices", [1, 8])
def test_ours_is_one_device_and_writes_everything_back(devices):
    model, optimizer, loss = build()
    loop = TrainingLoop(model, optimizer=optimizer, loss=loss, strategy=sharding.data_mesh(devices))
    loop.fit(ArrayBatches(data(), global_batch_size=BATCH), epochs=1, verbose=0)
    assert change(model) <= 1e-5
    _, *expected = on_one_device()
    found = arrays(model.non_trainable_variables), arrays(optimizer.variables)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
