import keras
import numpy as np
import pytest

from kdpkit import strategies, testing
from kdpkit.training import replica_exact


def fitted_weights(replicas, examples, batch_size):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    x, y = testing.toy_classification(examples)
    kind = "mirrored" if replicas > 1 else "one"
    with strategies.select_strategy(kind, devices=replicas).scope():
        model = replica_exact(testing.tiny_classifier())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), loss)
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize(("examples", "batch_size"), [(22, 8), (9, 8), (7, 3)])
def test_uneven_batches_train_what_one_device_trains(replicas, examples, batch_size):
    one = fitted_weights(1, examples, batch_size)
    np.testing.assert_allclose(fitted_weights(replicas, examples, batch_size), one, atol=1e-6)
