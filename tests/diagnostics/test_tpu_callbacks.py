"""What callbacks cost, and that Keras does what is documented of it."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import threading

import keras
import pytest

from kdpkit import callbacks, testing
from kdpkit.diagnostics import check_tpu
from kdpkit.diagnostics._doctor.tpu_rules import makes_keras_wait

ON_JAX = keras.backend.backend() == "jax"


class Batchwise(keras.callbacks.Callback):
    """A callback of a user, which notes the threads that call it."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def on_train_batch_end(self, batch, logs=None):
        self.threads.add(threading.current_thread())


class Safe(Batchwise):
    async_safe = True


class Old(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


class Epochwise(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        pass


def trained_with(*watching):
    x, y = testing.toy_classification(64, features=8)
    model = testing.tiny_classifier(features=8)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=list(watching))


def slow(*watching, **settings):
    found = check_tpu(callbacks=list(watching), **settings).findings
    return [finding.where for finding in found if finding.level == "slow"]


@pytest.mark.jax
def test_keras_waits_for_each_step_where_a_callback_makes_it():
    for other, waits in ((Epochwise(), False), (Batchwise(), True), (Old(), True)):
        spy = Safe()
        trained_with(spy, other)
        assert makes_keras_wait(other) == waits
        assert (spy.threads == {threading.main_thread()}) == waits


@pytest.mark.jax
def test_callbacks_with_hooks_at_the_end_of_a_batch_are_found(tmp_path):
    waiting = [
        Batchwise(),
        Old(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras")),
    ]
    for callback in waiting:
        assert slow(callback) == [f"callback {type(callback).__name__}"]
    assert len(slow(*waiting)) == len(waiting)


def test_the_usual_set_of_kdpkit_is_clean(tmp_path):
    usual = callbacks.training_callbacks(tmp_path, global_batch_size=64, replicas=8)
    assert slow(*usual, callbacks.Resume(tmp_path / "state")) == []


@pytest.mark.jax
def test_keras_does_not_wait_for_the_usual_set_of_kdpkit(tmp_path):
    spy = Safe()
    trained_with(spy, *callbacks.training_callbacks(tmp_path, global_batch_size=8))
    assert threading.main_thread() not in spy.threads


@pytest.mark.jax
def test_a_list_of_callbacks_is_opened():
    keras_own = {"add_history": True, "add_progbar": True}
    for callback, found in ((Batchwise(), ["callback Batchwise"]), (Epochwise(), [])):
        together = keras.callbacks.CallbackList([callback], **keras_own)
        assert slow(together) == found
        assert [f.where for f in check_tpu(callbacks=together).findings] == found
