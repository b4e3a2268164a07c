"""A strategy that the kit made, and a model that was meant for it, outside of its scope."""

import contextlib

import keras
import numpy as np
import pytest

from kdpkit import strategies, testing
from kdpkit.training import check_parity, replica_exact

pytestmark = pytest.mark.tensorflow

X, Y = np.zeros((9, 4), "float32"), np.zeros((9, 3), "float32")
CALLS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
}


@pytest.fixture(autouse=True)
def _fresh_program():
    strategies._made.clear()
    strategies._is_one_used.clear()
    yield
    strategies._is_one_used.set()


def mirrored(replicas=2):
    return strategies.select_strategy("mirrored", devices=replicas)


def built():
    return testing.tiny_classifier()


def compiled(model):
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("order", ["before", "after", "compiled inside", "loaded", "cloned"])
def test_a_model_outside_the_scope_raises_in_any_order(order, call, tmp_path):
    strategy = mirrored() if order != "after" else None
    model = built()
    if order == "loaded":
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    if order == "cloned":
        model = keras.models.clone_model(model)
    if order == "compiled inside":
        with strategy.scope():
            compiled(model)
        replica_exact(model)
    else:
        compiled(replica_exact(model))
    strategy = strategy or mirrored()
    with pytest.raises(ValueError, match=r"outside the strategy's scope.*2 replicas.*leave out"):
        CALLS[call](model)
    del strategy


def test_a_model_that_enters_the_scope_only_to_train_raises():
    model, strategy = compiled(replica_exact(built())), mirrored()
    strategies._made.clear()  # as if the kit had not made it
    with strategy.scope(), pytest.raises(ValueError, match="outside the strategy's scope"):
        model.fit(X, Y, verbose=0)


def trained_in(strategy):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = compiled(replica_exact(built()))
    return model.fit(X, Y, verbose=0).history


def test_one_device_is_compared_with_several_in_any_order():
    trained_in(None)  # before there is a strategy
    strategy = mirrored()
    trained_in(strategy)
    trained_in(None)
    other = mirrored(3)  # as in the cell of a notebook that is run again
    assert not trained_in(None).keys() ^ trained_in(other).keys()


def test_what_needs_no_scope_does_not_raise():
    strategy = mirrored(1), strategies.select_strategy("one")
    trained_in(None)
    several = mirrored()
    compiled(built()).fit(X, Y, verbose=0)  # not to be exact
    assert check_parity(lambda: compiled(replica_exact(built())), (X, Y + 1), replicas=2).equal
    del strategy, several


def test_a_strategy_that_is_gone_is_forgotten():
    mirrored()
    trained_in(None)


def test_steps_that_the_user_compiles_train_on_one_device():
    class OwnSteps(keras.Sequential):
        def make_train_function(self):  # without `force`, as Keras calls it
            return super().make_train_function()

    compiled(replica_exact(OwnSteps([keras.layers.Dense(3)]))).fit(X, Y, verbose=0)
