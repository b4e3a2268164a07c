"""Keras on JAX waits for each step where a callback makes it: one of a user, none of kdpkit's."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import threading

import keras
import pytest

from kdpkit import batches, callbacks, testing

pytestmark = pytest.mark.jax


class Batchwise(keras.callbacks.Callback):
    """A callback of a user, which notes the threads that call it."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def on_train_batch_end(self, batch, logs=None):
        self.threads.add(threading.current_thread())


class Safe(Batchwise):
    async_safe = True


def waits_with(states, *others):
    spy, resume = Safe(), callbacks.Resume(states)
    data = testing.toy_classification(64, features=8)
    train = resume.track(batches.ArrayBatches(data, global_batch_size=8))
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(train, shuffle=False, verbose=0, callbacks=[spy, *others, resume])
    return threading.main_thread() in spy.threads


def test_keras_does_not_wait_for_the_usual_set_of_kdpkit(tmp_path):
    usual = callbacks.training_callbacks(tmp_path, global_batch_size=8)
    assert not waits_with(tmp_path / "usual", *usual)
    assert waits_with(tmp_path / "own", Batchwise())
