import itertools
import time

import keras
import numpy as np
import pytest

from kdpkit.callbacks import Throughput, _throughput

from .falling_weight import falling_weight, ones


class Clock(keras.callbacks.Callback):
    """The clock that Throughput reads: it moves in hooks alone, and by known seconds."""

    def __init__(self, monkeypatch, *, first_step=1.0, **hooks):
        super().__init__()
        self.now = 0.0
        steps = itertools.chain([first_step], itertools.repeat(1.0))
        self.on_train_batch_begin = lambda *_, **__: self.move(next(steps))
        for hook, seconds in hooks.items():
            setattr(self, hook, lambda *_, seconds=seconds, **__: self.move(seconds))
        monkeypatch.setattr(_throughput, "time", self)

    def move(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now

    def on_train_batch_end(self, batch, logs=None):
        """Make Keras on JAX wait for each step, so that steps and clock are in step."""


def test_the_epochs_steps_are_counted_exactly_and_all_else_is_a_multiple(monkeypatch):
    model = falling_weight("sgd", steps_per_execution=3)
    speed = Throughput(4, tokens_per_example=2.5)
    callbacks = [speed, Clock(monkeypatch)]
    history = model.fit(**ones(8), epochs=3, callbacks=callbacks).history
    steps = 8 / 3  # a second, in which an execution has three of them
    for name, factor in (("steps", 1), ("examples", 4), ("tokens", 10)):
        assert history[f"{name}_per_second"][1:] == pytest.approx([factor * steps] * 2)


def test_the_wait_for_the_first_batch_counts_but_not_compilation_and_validation(monkeypatch):
    data = ones(4)
    clock = Clock(
        monkeypatch,
        first_step=1000.0,  # as if it compiled
        on_epoch_begin=4.0,  # as if the data were slow to begin: after `Throughput` in the list
        on_epoch_end=100.0,
        on_test_begin=100.0,
        on_test_batch_end=100.0,
    )
    validation = (data["x"], data["y"])
    callbacks = [Throughput(), clock]
    history = falling_weight("sgd").fit(
        **data, epochs=2, validation_data=validation, callbacks=callbacks
    )
    assert history.history["steps_per_second"] == [1.0, 0.5]


STEP_SECONDS = 0.05


class Sleeping(keras.layers.Layer):
    """Is part of a step on the device, which lasts; the machine's load can only lengthen it."""

    def call(self, x):
        def zero(_):
            time.sleep(STEP_SECONDS)
            return np.zeros((), "float32")

        if keras.backend.backend() == "jax":
            import jax

            number = jax.lax.stop_gradient(x[0, 0])
            return x + jax.pure_callback(zero, jax.ShapeDtypeStruct((), "float32"), number)
        import tensorflow as tf

        return x + tf.ensure_shape(tf.numpy_function(zero, [x[0, 0]], tf.float32), ())


def test_the_time_is_that_of_the_work_and_not_of_its_dispatch():
    model = keras.Sequential([keras.Input((1,)), Sleeping(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(**ones(6), epochs=2, callbacks=[Throughput()]).history
    assert max(history["steps_per_second"]) <= 1 / STEP_SECONDS


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokens_per_example": 9}, "`global_batch_size` must be a positive integer.*None"),
        ({"global_batch_size": 2, "tokens_per_example": 0}, "`tokens_per_example` must be above 0"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Throughput(**arguments)
