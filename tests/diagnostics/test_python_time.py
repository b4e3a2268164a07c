"""Python functions that a framework calls are found and timed, and no others."""

import sys
import time

import keras
import pytest

from kdpkit.diagnostics._python_time import PythonWatch


def count_up():
    return sum(number * number for number in range(40_000))


class Calling(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002 Keras gives them
        count_up()


def watched(seconds, work):
    watch = PythonWatch()
    watch.start()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work()
    watch.stop()
    return watch


def test_a_function_that_keras_calls_is_found():
    calls = keras.callbacks.CallbackList([Calling()])
    watch = watched(0.5, lambda: calls.on_epoch_begin(0))
    assert watch.share > 0.5
    assert watch.longest.startswith("on_epoch_begin (test_python_time.py:")


def test_what_no_framework_calls_does_not_count():
    watch = watched(0.2, count_up)
    assert (watch.share, watch.longest) == (0.0, "")


def test_python_switches_threads_as_before():
    before = sys.getswitchinterval()
    watched(0.01, count_up)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_nothing_is_known_before_it_starts():
    watch = PythonWatch()
    watch.stop()
    assert (watch.share, watch.longest) == (0.0, "")
