import keras
import numpy as np
import pytest

from kdpkit import testing
from kdpkit.training import replica_exact


def build_clipping(exact):
    def build():
        model = testing.tiny_classifier()
        if exact:
            model = replica_exact(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), loss)
        return model

    return build


def test_asserting_parity_passes_where_replicas_are_exact():
    testing.assert_parity(build_clipping(exact=True), testing.toy_classification(8), replicas=2)


@pytest.mark.slow
def test_asserting_parity_fails_with_the_variable_that_differs():
    with pytest.raises(AssertionError, match="do not train.*`.*`.*gradients by"):
        testing.assert_parity(
            build_clipping(exact=False), testing.toy_classification(8), replicas=2
        )


def test_asserting_parity_fails_with_what_the_replicas_raised():
    with pytest.raises(AssertionError, match="cannot train.*AddN") as failed:
        testing.assert_parity(
            build_clipping(exact=False), testing.toy_classification(9), replicas=2
        )
    assert "AddN" in str(failed.value.__cause__)


def test_toy_models_and_data_depend_on_the_seed_alone():
    first, again = (testing.tiny_classifier(seed=3).get_weights() for _ in range(2))
    other = testing.tiny_classifier(seed=4).get_weights()
    for weight, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(weight, same)
    assert any((weight != new).any() for weight, new in zip(first, other, strict=True))
