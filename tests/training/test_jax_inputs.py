"""Inputs of every kind that Keras takes on JAX: the same batches, the same training.

tests/test_environments.py runs it there.
"""

import functools

import keras
import numpy as np
import pytest

from kdpkit import batches, sharding, testing
from kdpkit.training import TrainingLoop, replica_exact

pytestmark = pytest.mark.jax
EXAMPLES, SIZE, DEVICES = 22, 8, 4  # a last batch of 6, which 4 devices do not divide
X, Y = testing.toy_classification(EXAMPLES)


class OwnDataset(keras.utils.PyDataset):
    """A dataset as a user writes it."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * SIZE :][:SIZE], Y[index * SIZE :][:SIZE]


def arrays():
    return batches.ArrayBatches((X, Y), global_batch_size=SIZE, remainder="keep")


def grain_map():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source([*zip(X, Y, strict=True)]).batch(SIZE)


def grain_iterator():
    return grain_map().to_iter_dataset()


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


GRAIN = [grain_map, grain_iterator]
KINDS = [OwnDataset, arrays, *GRAIN, tf_data]


def build():
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


@functools.cache
def on_one_device():
    model = build()
    model.fit(X, Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), model.predict(X, batch_size=SIZE, verbose=0)


def by_loop(kind):
    model = build()
    loop = TrainingLoop(
        model, optimizer="sgd", loss=model.loss, strategy=sharding.data_mesh(DEVICES)
    )
    history = loop.fit(kind(), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    return model.get_weights(), loop.predict(kind(), verbose=0)


def by_fit(kind):
    with sharding.DataParallel(DEVICES).scope():
        model = replica_exact(build())
        model.fit(kind(), epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), model.predict(kind(), verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras of Grain's
@pytest.mark.parametrize("train", [by_loop, by_fit])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_trains_as_arrays_on_one_device(kind, train):
    (weights, predictions), (expected, of_expected) = train(kind), on_one_device()
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_allclose(predictions, of_expected, atol=1e-5)


@pytest.mark.parametrize("kind", [arrays, GRAIN[0]])
def test_padded_batches_evaluate_as_the_real_examples(kind):
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loop = TrainingLoop(
        model,
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=["accuracy"],
        strategy=sharding.data_mesh(DEVICES),
    )
    if kind is arrays:
        padded = batches.ArrayBatches((X, Y), global_batch_size=SIZE, remainder="pad", mode="eval")
    else:
        padded = grain_map().map(lambda batch: batches.pad_batch(batch, SIZE, mode="eval"))
    found = loop.evaluate(padded, verbose=0)
    plain = build()
    plain.compile("sgd", loss, metrics=["accuracy"])
    expected = plain.evaluate(X, Y, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])
