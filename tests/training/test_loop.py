"""One device against many: what TrainingLoop trains does not depend on the replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import strategies, testing
from kdpkit.training import TrainingLoop


def batches(size=4, examples=10):
    return tf.data.Dataset.from_tensor_slices(testing.toy_classification(examples)).batch(size)


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def loop_on(replicas, build=testing.tiny_classifier, loop=TrainingLoop, **settings):
    strategy = strategies.select_strategy(
        "mirrored" if replicas > 1 else "one", devices=replicas if replicas > 1 else None
    )
    with strategy.scope():
        model = build()
    settings = {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"]} | settings
    return loop(model, strategy=strategy, **settings)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_weights_and_logs_are_those_of_keras_fit_on_one_device(replicas, size):
    model = testing.tiny_classifier()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    expected = model.fit(batches(size), validation_data=batches(3), epochs=2, verbose=0)
    loop = loop_on(replicas)
    history = loop.fit(batches(size), batches(3), epochs=2, verbose=0)
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-6)
    for ours, theirs in zip(loop.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
