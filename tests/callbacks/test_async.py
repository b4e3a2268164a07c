"""Keras on JAX waits for each step where a callback makes it: one of a user, none of kdpkit's."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import threading

import keras
import pytest

from kdpkit import callbacks
from tests.callbacks.resume_programs import batches, compiled, fit

pytestmark = pytest.mark.jax


class Batchwise(keras.callbacks.Callback):
    def __init__(self, *, async_safe):
        super().__init__()
        self.async_safe, self.threads = async_safe, set()

    def on_train_batch_end(self, batch, logs=None):
        self.threads.add(threading.current_thread())


def waits_with(states, *others):
    spy, resume = Batchwise(async_safe=True), callbacks.Resume(states)
    fit(compiled(), resume.track(batches()), spy, *others, resume)
    return threading.main_thread() in spy.threads


def test_keras_does_not_wait_for_the_usual_set_of_kdpkit(tmp_path):
    usual = callbacks.training_callbacks(tmp_path, global_batch_size=4)
    assert not waits_with(tmp_path / "usual", *usual)
    assert waits_with(tmp_path / "own", Batchwise(async_safe=False))
