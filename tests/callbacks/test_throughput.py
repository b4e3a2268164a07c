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


@pytest.mark.parametrize(("steps_per_execution", "executions"), [(1, 8), (3, 3)])
def test_the_epochs_steps_are_counted_exactly(monkeypatch, steps_per_execution, executions):
    model = falling_weight("sgd", steps_per_execution=steps_per_execution)
    callbacks = [Throughput(), Clock(monkeypatch)]
    history = model.fit(**ones(8), epochs=3, callbacks=callbacks).history
    assert history["steps_per_second"][1:] == [8 / executions] * 2


def test_compilation_validation_and_the_time_between_epochs_are_left_out(monkeypatch):
    data = ones(4)
    clock = Clock(
        monkeypatch,
        first_step=1000.0,  # as if it compiled
        on_epoch_begin=100.0,
        on_epoch_end=100.0,
        on_test_begin=100.0,
        on_test_batch_end=100.0,
    )
    validation = (data["x"], data["y"])
    callbacks = [Throughput(), clock]
    history = falling_weight("sgd").fit(
        **data, epochs=2, validation_data=validation, callbacks=callbacks
    )
    assert history.history["steps_per_second"] == [1.0, 1.0]


def test_the_time_is_that_of_the_work_and_not_of_its_dispatch():
    width, steps = 1024, 6  # so much that what Keras does around it weighs little
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width, use_bias=False)])
    model.compile("sgd", "mse")
    x = np.ones((256 * steps, width), "float32")

    class Epochs(keras.callbacks.Callback):
        async_safe = True  # or Keras would wait for each step on JAX
        on_epoch_begin = on_epoch_end = lambda *_, **__: times.append(time.perf_counter())

    times = []
    history = model.fit(
        x, x, batch_size=256, epochs=3, verbose=0, callbacks=[Throughput(), Epochs()]
    ).history
    measured = steps / np.array(history["steps_per_second"])
    # In some epoch at least; in others the machine may have been busy with something else.
    assert max(measured / np.diff(times)[::2]) > 0.5


def test_examples_tokens_and_the_mfu_are_multiples_of_the_steps():
    speed = Throughput(4, tokens_per_example=2.5, step_flops=6e9, peak_flops=2e12)
    history = falling_weight("sgd").fit(**ones(5, batch_size=4), callbacks=[speed]).history
    steps = history["steps_per_second"][0]
    assert history["examples_per_second"] == [pytest.approx(4 * steps)]
    assert history["tokens_per_second"] == [pytest.approx(10 * steps)]
    assert history["mfu"] == [pytest.approx(0.003 * steps)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokens_per_example": 9}, "`global_batch_size` must be a positive integer.*None"),
        ({"global_batch_size": 2, "tokens_per_example": 0}, "`tokens_per_example` must be above 0"),
        ({"step_flops": 1e9}, "`peak_flops` must be a finite number.*None"),
        ({"step_flops": 0, "peak_flops": 1}, "`step_flops` must be above 0"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Throughput(**arguments)
