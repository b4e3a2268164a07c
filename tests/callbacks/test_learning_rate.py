import itertools
import re

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import example, given, settings

from kdpkit.callbacks import (
    LearningRateLogger,
    PrintLR,
    TensorBoard,
    Throughput,
    training_callbacks,
)

from .falling_weight import SetRate, Truth, falling_weight, ones, straight_decay


def test_history_has_the_schedules_rate_of_each_epochs_last_step():
    model = falling_weight(keras.optimizers.SGD(straight_decay()), steps_per_execution=3)
    history = model.fit(**ones(7), epochs=3, callbacks=[LearningRateLogger()]).history
    assert history["learning_rate"] == pytest.approx([0.94, 0.87, 0.8], rel=1e-6)


HOOKS = [f"on_{what}_{when}" for what in ("epoch", "train_batch") for when in ("begin", "end")]


@given(
    hooks=st.lists(st.sampled_from(HOOKS), max_size=3),
    position=st.integers(0, 3),
    accumulation=st.sampled_from([None, 2, 3]),
    is_scaled=st.booleans(),
)
@settings(max_examples=8)
@example(
    hooks=["on_train_batch_end", "on_train_batch_begin"],
    position=1,
    accumulation=None,
    is_scaled=False,
)
@example(
    hooks=["on_train_batch_begin", "on_train_batch_end"], position=1, accumulation=3, is_scaled=True
)
def test_a_plain_rate_is_logged_as_applied_whoever_sets_it_and_in_any_order(
    hooks, position, accumulation, is_scaled
):
    values = itertools.count(0.5, 0.015625)
    callbacks, truth = [SetRate(hook, values) for hook in hooks], Truth()
    callbacks.insert(position, LearningRateLogger())
    optimizer = keras.optimizers.SGD(0.25, gradient_accumulation_steps=accumulation)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
    model = falling_weight(optimizer)
    fitted = model.fit(**ones(4), epochs=3, callbacks=[truth, *callbacks])
    assert fitted.history["learning_rate"] == pytest.approx(truth.epochs, rel=1e-4)


@pytest.mark.parametrize("hook", HOOKS[2:])
def test_the_rate_of_the_last_of_several_steps_in_a_call_is_logged(hook):
    values = itertools.count(0.5, -0.125)
    model = falling_weight(keras.optimizers.SGD(0.5), steps_per_execution=3)
    setting = [LearningRateLogger(), SetRate(hook, values)]
    fitted = model.fit(**ones(7), callbacks=setting)
    # Without another callback Keras on JAX does not wait for the steps.
    (rate,) = fitted.history["learning_rate"]
    assert rate == (0.25 if hook.endswith("begin") else 0.375)


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_update_that_no_batch_made_is_left_out():
    import tensorflow as tf

    x = np.ones((4, 2, 1), "float32")
    spec = tf.TensorSpec((2, 1))
    data = tf.data.Dataset.from_generator(
        lambda: zip(x, x, strict=True), output_signature=(spec, spec)
    )
    model, truth = falling_weight(keras.optimizers.SGD(straight_decay())), Truth()
    fitted = model.fit(data, epochs=3, verbose=0, callbacks=[LearningRateLogger(), truth])
    assert fitted.history["learning_rate"] == pytest.approx(truth.epochs, rel=1e-4)


def test_accumulation_reports_the_rate_at_the_batch_of_the_update_and_none_before_the_first():
    optimizer = keras.optimizers.SGD(straight_decay(), gradient_accumulation_steps=4)
    model, truth, lines = falling_weight(optimizer), Truth(), []
    callbacks = [LearningRateLogger(), PrintLR(lines.append), truth]
    history = model.fit(**ones(3), epochs=4, callbacks=callbacks).history
    assert history["learning_rate"] == pytest.approx([0.97, 0.93, 0.89], rel=1e-6)
    assert history["learning_rate"] == pytest.approx(truth.epochs[1:], rel=1e-5)
    assert lines[:2] == [
        "Learning rate of epoch 1: none, `model.optimizer` has applied no update",
        "Learning rate of epoch 2: 0.97 (step 4)",
    ]


@pytest.mark.parametrize("rate", [0.5, straight_decay()], ids=["plain", "schedule"])
def test_steps_that_loss_scaling_skips_apply_no_rate(rate):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=2.0)
    model, truth = falling_weight(optimizer), Truth()
    data = ones(5)
    data["x"] = data["x"].copy()
    data["x"][4:] = np.inf  # the gradients of the last three batches overflow
    fitted = model.fit(**data, epochs=2, callbacks=[LearningRateLogger(), truth])
    assert fitted.history["learning_rate"] == pytest.approx(truth.epochs, rel=1e-6)
    assert int(optimizer.iterations) == 4


def test_printlr_prints_once_an_epoch_below_the_progress_line(capsys):
    model = falling_weight(keras.optimizers.SGD(straight_decay()))
    model.fit(**{**ones(4), "verbose": 2}, epochs=2, callbacks=[PrintLR()])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [re.sub(" - .*", "", line) for line in lines] == [
        "Epoch 1/2",
        "4/4",
        "Learning rate of epoch 1: 0.97 (step 4)",
        "Epoch 2/2",
        "4/4",
        "Learning rate of epoch 2: 0.93 (step 8)",
    ]


def test_a_line_of_the_usual_set_has_each_thing_once_in_120_characters(capsys):
    model = falling_weight(keras.optimizers.SGD(straight_decay()), metrics=["mae"])
    data, usual = ones(4), training_callbacks(global_batch_size=2)
    validation = (data["x"], data["y"])
    fitted = model.fit(
        **{**data, "verbose": 2}, epochs=2, validation_data=validation, callbacks=usual
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert max(map(len, lines)) <= 120
    for name in ("rate", "step", "examples_per_second"):
        assert sum(line.lower().count(name) for line in lines[:3]) <= 2 * (name == "step") + (
            name == "rate"
        )
    assert {"learning_rate", "steps_per_second", "examples_per_second"} <= fitted.history.keys()


def test_the_usual_set_works_in_a_loop_of_ones_own(capsys):
    model, usual = falling_weight(keras.optimizers.SGD(0.5)), training_callbacks()
    loop = keras.callbacks.CallbackList(usual, model=model, epochs=1, steps=2)
    loop.on_train_begin()
    loop.on_epoch_begin(0)
    for batch in range(2):
        loop.on_train_batch_begin(batch)
        model.train_on_batch(np.ones((2, 1)), np.ones((2, 1)))
        loop.on_train_batch_end(batch)
    loop.on_epoch_end(0, {"loss": 0.0})
    loop.on_train_end()
    assert capsys.readouterr().out == "Learning rate of epoch 1: 0.5 (step 2)\n"


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="since Keras 3.15")
def test_several_optimizers_have_no_single_rate(capsys):
    parts = {".*kernel": keras.optimizers.Adam()}
    of_all = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), parts)
    model = falling_weight(keras.optimizers.MultiOptimizer(of_all))
    history = model.fit(**ones(2), callbacks=[LearningRateLogger(), PrintLR()]).history
    assert "learning_rate" not in history
    assert "epoch 1: no single one, `model.optimizer` is Multi" in capsys.readouterr().out


@pytest.mark.tensorflow
def test_a_model_without_a_keras_optimizer_has_no_rate(capsys, tmp_path):
    class Own(keras.Model):
        def train_step(self, _):
            return {"own": 2.0}

    model = Own()
    model.compile(optimizer=None)
    watching = [LearningRateLogger(), PrintLR(), Throughput(2), TensorBoard(tmp_path)]
    history = model.fit(**ones(2), callbacks=watching).history
    assert history.keys() == {"own", "steps_per_second", "examples_per_second"}
    assert "no single one, `model.optimizer` is NoneType" in capsys.readouterr().out


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),  # noqa: ARG005
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_set_the_rate_fail_on_a_schedule(callback):
    """A fact of Keras, for which the page of facts names this test."""
    model = falling_weight(keras.optimizers.SGD(straight_decay()))
    with pytest.raises(TypeError, match="not settable"):
        model.fit(**ones(2), epochs=3, callbacks=[callback])
