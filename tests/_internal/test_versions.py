"""What is different with older versions of what kdpkit stands on."""

import functools

import keras
import pytest
from packaging.version import Version

from kdpkit import strategies, testing
from kdpkit._internal import versions
from kdpkit.training import TrainingLoop, replica_exact

before_means_of_activities = pytest.mark.skipif(
    versions.KERAS >= (3, 14), reason="Keras 3.14 and later take the mean over the examples"
)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_a_batch_ends_with_the_last_index_of_its_execution():
    seen = []

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 Keras' hook
            seen.append(batch)

    model = testing.tiny_classifier()
    model.compile("sgd", LOSS, steps_per_execution=3)
    x, y = testing.toy_classification(12)
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[Ends()], shuffle=False)
    assert seen == [2, 5]


@before_means_of_activities
@pytest.mark.tensorflow
def test_replicas_do_not_support_sums_over_activities():
    import tensorflow as tf

    strategy = strategies.select_strategy("mirrored", devices=2)
    with strategy.scope():
        dense = keras.layers.Dense(3, activity_regularizer="l2")
        model = keras.Sequential([keras.Input((4,)), dense])
        model.compile("sgd", LOSS)
    batches = tf.data.Dataset.from_tensor_slices(testing.toy_classification(9)).batch(4)
    exact = replica_exact(model)
    for call in (exact.fit, exact.evaluate):
        with pytest.raises(ValueError, match="Install Keras 3.14 or later.*layer='dense'"):
            call(batches, verbose=0)
    loop = TrainingLoop(model, optimizer="sgd", loss=LOSS, strategy=strategy)
    for call in (functools.partial(loop.fit, epochs=1), loop.evaluate):
        with pytest.raises(ValueError, match="Install Keras 3.14 or later"):
            call(batches)


@pytest.mark.jax
def test_several_processes_raise_on_an_old_jax_or_keras():
    import jax

    from kdpkit import sharding

    if versions.KERAS >= (3, 15) and Version(jax.__version__) >= Version("0.10"):
        pytest.skip("these take several processes")
    with pytest.raises(ValueError, match="need JAX 0.10 and Keras 3.15 or later.*jax="):
        sharding.join_processes("localhost:1", process_count=2, process_index=0)
