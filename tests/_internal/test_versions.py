"""What is different with older versions of what kdpkit stands on."""

import keras
import pytest
from packaging.version import Version

from kdpkit import testing
from kdpkit._internal import versions

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


@pytest.mark.jax
def test_several_processes_raise_on_an_old_jax_or_keras():
    import jax

    from kdpkit import sharding

    if versions.KERAS >= (3, 15) and Version(jax.__version__) >= Version("0.10"):
        pytest.skip("these take several processes")
    with pytest.raises(ValueError, match="need JAX 0.10 and Keras 3.15 or later.*jax="):
        sharding.join_processes("localhost:1", process_count=2, process_index=0)
