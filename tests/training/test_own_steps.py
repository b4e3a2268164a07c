"""Steps of loops of one's own, exact by the decorator: the calls, the strategy, and the errors."""

import keras
import pytest

from kdpkit import strategies, testing
from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow

X, Y = testing.toy_classification(11)


def mirrored(replicas=2):
    return strategies.select_strategy("mirrored", devices=replicas)


def test_a_step_outside_the_scope_of_its_variables_raises():
    strategy = mirrored()
    with strategy.scope():
        model = testing.tiny_classifier()
    for made in ({strategy}, ()):  # by the kit, or by TensorFlow's own constructor
        strategies._made.clear()
        strategies._is_one_used.clear()
        strategies._made.update(made)
        with pytest.raises(ValueError, match=r"step was made outside.* step=.*lambda.*Make it in"):
            replica_exact(lambda x: model(x))(X)


@pytest.mark.parametrize("value", [3, keras.Sequential, keras.layers.Dense(1)])
def test_what_is_no_function_raises(value):
    with pytest.raises(ValueError, match="a function of a global batch"):
        replica_exact(value)
