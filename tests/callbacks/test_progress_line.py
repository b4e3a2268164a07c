"""An epoch in lines of at most 100 columns, in a terminal and in a file."""

import re
import sys
import time

import keras
import pytest
import tensorflow as tf

from kdpkit import callbacks
from kdpkit.callbacks import _progress_line

LINE = re.compile(r"Epoch 1/2  10/10  \d+ s  [\d.]+ m?s/step  [\d,]+ examples/s  loss: \d\.\d{4}")
METRICS = [keras.metrics.MeanAbsoluteError(name=f"error_{i}") for i in range(9)]


def compiled(metrics=()):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=list(metrics))
    return model


def examples():
    x = keras.ops.ones((40, 1))
    return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)


def watching(tmp_path):
    return callbacks.training_callbacks(tmp_path, global_batch_size=4)


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_an_epoch_is_a_line_and_the_first_step_is_announced(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    data = examples()
    compiled().fit(data, validation_data=data, epochs=2, callbacks=watching(tmp_path))
    first, epoch, rate, *_ = lines_of(capsys)
    assert re.fullmatch(r"Compiling the first step \.\.\. done in \d+ s", first)
    assert LINE.match(epoch)
    assert "val_loss: " in epoch
    assert rate.startswith("Learning rate of epoch 1")


def test_no_line_is_longer_and_nothing_is_left_out(tmp_path, capsys):
    data = examples()
    history = compiled(METRICS).fit(
        data, validation_data=data, epochs=2, callbacks=watching(tmp_path)
    )
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 100
    shown = re.findall(r"([a-z]\w+): \d", "\n".join(lines))
    assert {*shown} == {name for name in history.history if "error" in name or "loss" in name}
    assert "cpu_utilization" in history.history
    assert "utilization" not in "\n".join(lines)


def test_it_is_silent_where_keras_is(capsys):
    compiled().fit(examples(), verbose=0, callbacks=[callbacks.ProgressLine()])
    assert lines_of(capsys) == []


@pytest.mark.parametrize("steps", [3, 64])
def test_steps_of_an_execution_are_counted_once(steps, capsys):
    model = compiled()
    model.compile("sgd", "mse", steps_per_execution=steps)
    model.fit(examples(), callbacks=callbacks.ProgressLine())
    assert lines_of(capsys)[1].startswith("Epoch 1/1  10/10  ")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, of unknown lengths
def test_a_dataset_of_unknown_length(capsys):
    data = examples().filter(lambda *_: True)
    compiled().fit(data, callbacks=callbacks.ProgressLine())
    assert lines_of(capsys)[1].startswith("Epoch 1/1  10 steps  ")


def test_a_file_gets_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setitem(_progress_line._INTERVAL_SECONDS, False, 0.2)
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: time.sleep(0.11))
    compiled().fit(examples(), callbacks=[pause, callbacks.ProgressLine()])
    counted = [line.split()[2] for line in lines_of(capsys)[1:]]
    assert 3 <= len(counted) <= 6
    assert counted[-1] == "10/10"


def test_a_terminal_updates_the_line_in_place(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: time.sleep(0.11))
    compiled(METRICS).fit(examples(), callbacks=[pause, callbacks.ProgressLine()])
    _, line, *others = capsys.readouterr().out.split("\n")
    states = line.split("\r")[1:]
    assert [state.split()[2] for state in states] == [f"{n}/10" for n in range(2, 11)] + ["10/10"]
    assert {len(state) for state in states[:-1]} == {59}
    assert all(len(other) <= 59 for other in others)


def test_a_run_that_goes_on_inside_an_epoch_counts_from_there(tmp_path, capsys):
    def train(*others):
        resume = callbacks.Resume(tmp_path)
        line = callbacks.ProgressLine()
        compiled().fit(resume.track(examples()), epochs=2, callbacks=[line, *others, resume])
        return lines_of(capsys)

    def stop(batch, logs=None):  # noqa: ARG001 as Keras calls it
        if batch == 3:
            model.stop_training = True

    model = compiled()
    resume = callbacks.Resume(tmp_path)
    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(resume.track(examples()), verbose=0, callbacks=[stopping, resume])
    said, _, first, second = train()
    assert said == f"Continuing the run in {tmp_path}: epoch 1 of 2, after 4 of 10 steps."
    assert first.startswith("Epoch 1/2  10/10  ")
    assert second.startswith("Epoch 2/2  10/10  ")
