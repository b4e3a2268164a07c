# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import itertools
import time

import keras
import numpy as np
import pytest

from kdpkit.callbacks import Throughput

from .falling_weight import falling_weight, ones

needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="tf.data and tf.distribute are TensorFlow's"
)


class Stopwatch(keras.callbacks.Callback):
    """Takes the time from an epoch's first batch to the end of its last, apart from Throughput."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = None

    def on_train_batch_begin(self, batch, logs=None):
        self._start = self._start or time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(self._end - self._start)


class Sleep(keras.callbacks.Callback):
    """Makes a hook take a known time, so that what is counted and what is not can be told apart."""

    def __init__(self, hook, seconds, *, first_only=False):
        super().__init__()
        naps = itertools.chain([seconds], itertools.repeat(0 if first_only else seconds))
        setattr(self, hook, lambda *_, **__: time.sleep(next(naps)))


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_the_epochs_steps_are_counted_exactly(steps_per_execution):
    model = falling_weight("sgd", steps_per_execution=steps_per_execution)
    stopwatch = Stopwatch()
    callbacks = [Throughput(), stopwatch, Sleep("on_train_batch_begin", 0.04)]
    history = model.fit(**ones(8), epochs=3, callbacks=callbacks).history
    steps = np.multiply(history["steps_per_second"], stopwatch.seconds)[1:]
    assert steps == pytest.approx([8, 8], rel=0.1)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@needs_tensorflow  # there a dataset can end more than once
def test_the_steps_of_a_dataset_of_unknown_size_are_counted_exactly(steps_per_execution):
    import tensorflow as tf

    x = np.ones((16, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(2).filter(lambda *_: True)
    model = falling_weight("sgd", steps_per_execution=steps_per_execution)
    stopwatch = Stopwatch()
    callbacks = [Throughput(), stopwatch, Sleep("on_train_batch_begin", 0.04)]
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks).history
    steps = np.multiply(history["steps_per_second"], stopwatch.seconds)[1:]
    assert steps == pytest.approx([8, 8], rel=0.1)


def test_compilation_validation_and_the_time_between_epochs_are_left_out():
    model = falling_weight("sgd")
    data = ones(4)
    callbacks = [
        Sleep("on_epoch_end", 0.5),
        Sleep("on_test_begin", 0.5),
        Throughput(),
        Sleep("on_train_batch_begin", 0.5, first_only=True),  # as if the first step compiled
    ]
    validation = (data["x"], data["y"])
    history = model.fit(**data, epochs=2, validation_data=validation, callbacks=callbacks).history
    seconds = np.divide([3, 4], history["steps_per_second"])
    assert all(seconds < 0.45)


def test_the_time_is_that_of_the_work_and_not_of_its_dispatch():
    width, steps = 2048, 10  # so much that what Keras does around it weighs little
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width, use_bias=False)])
    model.compile("sgd", "mse")
    x = np.ones((256 * steps, width), "float32")

    class Clock(keras.callbacks.Callback):
        async_safe = True  # or Keras would wait for each step on JAX
        on_epoch_begin = on_epoch_end = lambda *_, **__: times.append(time.perf_counter())

    times = []
    history = model.fit(
        x, x, batch_size=256, epochs=2, verbose=0, callbacks=[Throughput(), Clock()]
    ).history
    assert steps / history["steps_per_second"][1] > 0.5 * (times[3] - times[2])


def test_examples_tokens_and_replicas_are_multiples_of_the_steps():
    speed = Throughput(4, replicas=2, tokens_per_example=2.5)
    history = falling_weight("sgd").fit(**ones(5, batch_size=4), callbacks=[speed]).history
    steps = history["steps_per_second"][0]
    assert history["examples_per_second"] == [pytest.approx(4 * steps)]
    assert history["examples_per_second_per_replica"] == [pytest.approx(2 * steps)]
    assert history["tokens_per_second"] == [pytest.approx(10 * steps)]


@needs_tensorflow
def test_replicas_share_the_measured_batch():
    from kdpkit.strategies import select_strategy

    with select_strategy("mirrored", devices=2).scope():
        model = falling_weight("sgd", steps_per_execution=2)
    history = model.fit(**ones(5, batch_size=4), epochs=2, callbacks=[Throughput(4)]).history
    assert len(history["examples_per_second"]) == 2


def test_a_first_epoch_of_one_execution_has_no_speed():
    model = falling_weight("sgd", steps_per_execution=4)
    history = model.fit(**ones(4), epochs=3, callbacks=[Throughput(2)]).history
    assert len(history["loss"]) == 3
    assert len(history["steps_per_second"]) == 2


def test_the_speed_so_far_stands_in_the_progress_line(capsys):
    falling_weight("sgd").fit(**{**ones(3), "verbose": 1}, callbacks=[Throughput(2)])
    line = next(
        line for line in capsys.readouterr().out.split("step - ")[1:] if "_per_second" in line
    )
    assert "steps_per_second" in line
    assert "examples_per_second" in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 0}, "`global_batch_size` must be a positive integer.*=0"),
        ({"global_batch_size": 10, "replicas": 4}, "multiple of `replicas`.* 8 and 12"),
        ({"replicas": 0}, "`replicas` must be a positive integer.*replicas=0"),
        ({"tokens_per_example": 9}, "need the number of examples.*Give `global_batch_size`"),
        ({"global_batch_size": 2, "tokens_per_example": 0}, "`tokens_per_example` must be above 0"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Throughput(**arguments)
