"""What callbacks cost, and that Keras does what is said of it."""

# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import threading

import keras
import pytest

from kdpkit import callbacks, experiment, testing
from kdpkit.diagnostics import check_tpu
from kdpkit.diagnostics._tpu_callbacks import makes_keras_wait

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
def test_keras_waits_for_each_step_where_a_callback_is_said_to_make_it():
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
        callbacks.LearningRateLogger(every="batch"),
    ]
    for callback in waiting:
        assert slow(callback) == [f"callback {type(callback).__name__}"]
    assert len(slow(*waiting)) == len(waiting)


@pytest.mark.jax
def test_callbacks_without_such_hooks_are_not(tmp_path):
    assert (
        slow(
            Safe(),
            Epochwise(),
            keras.callbacks.EarlyStopping(),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: None),
        )
        == []
    )


def test_the_usual_set_of_kdpkit_is_clean(tmp_path):
    usual = callbacks.training_callbacks(tmp_path, global_batch_size=64, replicas=8)
    with experiment.saving_on_interrupt(testing.tiny_classifier(), None) as stop:
        assert slow(*usual, stop, callbacks.Resume(tmp_path / "state")) == []


@pytest.mark.jax
def test_keras_does_not_wait_for_the_usual_set_of_kdpkit(tmp_path):
    spy = Safe()
    trained_with(spy, *callbacks.training_callbacks(tmp_path, global_batch_size=8))
    assert threading.main_thread() not in spy.threads


@pytest.mark.tensorflow
@pytest.mark.parametrize(("every", "found"), [("batch", 1), (10, 1), (500, 0), ("epoch", 0)])
def test_event_files_written_every_few_batches_are_found(every, found, tmp_path):
    for kind in (keras.callbacks.TensorBoard, callbacks.TensorBoard):
        assert len(slow(kind(str(tmp_path), update_freq=every))) == found


@pytest.mark.tensorflow
def test_on_tensorflow_keras_waits_in_any_case_and_one_note_says_so():
    spy = Safe()
    trained_with(spy, Epochwise())
    assert spy.threads == {threading.main_thread()}
    report = check_tpu(callbacks=[Batchwise()])
    assert report.clean
    assert [finding.rule for finding in report.findings] == ["host-transfer", "tensorflow"]


@pytest.mark.tensorflow
def test_several_steps_in_a_call_need_no_note():
    model = testing.tiny_classifier()
    model.compile("sgd", "mse", steps_per_execution=4)
    report = check_tpu(model=model, callbacks=[Epochwise()])
    assert [finding.rule for finding in report.findings] == ["tensorflow"]
    assert "KERAS_BACKEND=jax" in str(report)
