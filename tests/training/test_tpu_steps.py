"""`fit` on the replicas of a TPU, in the place of whose cores are CPUs: none was available."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kdpkit import strategies, testing
from kdpkit.training import replica_exact
from kdpkit.training.tensorflow import _tpu_steps
from tests.process_programs import assert_close, by_fit

pytestmark = [pytest.mark.tensorflow, pytest.mark.usefixtures("cores")]
LOSSES = keras.losses.SparseCategoricalCrossentropy


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(_tpu_steps, "STRATEGIES", (tf.distribute.MirroredStrategy,))


def penalized():
    keras.utils.set_random_seed(0)
    first = layers.Dense(8, "tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((4,)), first, layers.Dense(3)])


def masked():
    keras.utils.set_random_seed(0)
    embedding = layers.Embedding(9, 4, mask_zero=True)
    return keras.Sequential([keras.Input((6,), dtype="int32"), embedding, layers.Dense(9)])


def examples(build, weights):
    random = np.random.default_rng(0)
    data = testing.toy_classification(10)
    if build is masked:
        words = np.tril(random.integers(1, 9, (10, 6)))  # examples of 1 to 6 words
        data = words, words
    weights = (random.uniform(size=10),) if weights else ()
    return tf.data.Dataset.from_tensor_slices((*data, *weights)).batch(4)


def trained(strategy, build, data, **loss):
    with strategy.scope():
        model = build()
    optimizer = keras.optimizers.SGD(0.2, 0.9, global_clipnorm=0.05, use_ema=True)
    compiled = {"optimizer": optimizer, "loss": LOSSES(from_logits=True, **loss)}
    return by_fit(model, data, data, epochs=2, compiled=compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "weights", "loss"),
    [
        (penalized, True, {"reduction": "mean_with_sample_weight"}),
        (penalized, True, {"reduction": "sum"}),
        (masked, False, {}),
    ],
)
def test_replicas_of_a_tpu_add_up_to_one_device(build, weights, loss):
    """Batches of 4, 4 and 2 on three cores, of which one may have no example."""
    data = examples(build, weights)
    one, tpu = (
        trained(strategies.select_strategy(kind, devices=devices), build, data, **loss)
        for kind, devices in (("one", None), ("mirrored", 3))
    )
    assert_close(tpu, one)


def regularized(inner):
    return keras.Sequential([*inner, layers.Dense(3, activity_regularizer="l2")])


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def of_all(_, predictions):
    return keras.ops.std(predictions)


@pytest.mark.parametrize(
    ("build", "compiled", "sentence"),
    [
        (OwnStep, {}, "must be Keras' own.*KERAS_BACKEND=jax"),
        (regularized, {}, "nor activities regularized"),
        (keras.Sequential, {"loss": of_all}, "compares examples"),
        (
            keras.Sequential,
            {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)},
            "neither gradients accumulated",
        ),
    ],
)
def test_what_needs_the_examples_of_all_cores_raises(build, compiled, sentence):
    with strategies.select_strategy("mirrored", devices=2).scope():
        model = replica_exact(build([keras.Input((4,)), layers.Dense(3)]))
    model.compile(**{"optimizer": "sgd", "loss": LOSSES(from_logits=True)} | compiled)
    with pytest.raises(ValueError, match=sentence):
        model.fit(*testing.toy_classification(6), verbose=0)
