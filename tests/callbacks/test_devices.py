# ruff: noqa: ARG002 Keras calls its hooks with arguments that not every callback needs

import math
import re
import sys
import threading
import time

import keras
import pytest

from kdpkit.callbacks import DeviceMonitor, _devices
from kdpkit.callbacks._devices import is_reading, starving

from .falling_weight import falling_weight, ones

HOST = {"process_cpu_utilization", "process_memory_gib"}


def fit(*callbacks, steps=4, epochs=2, model=None, **settings):
    model = model or falling_weight("sgd")
    return model.fit(**ones(steps), epochs=epochs, callbacks=[*callbacks], **settings).history


@pytest.fixture
def read(monkeypatch):
    """Return a function that has these functions called, in place of the machine's sources."""

    def replace(*functions):
        sources = lambda: {one.__name__: iter(one, None) for one in functions}  # noqa: E731
        monkeypatch.setattr(_devices, "_sources", sources)

    return replace


def assert_reported_once(capsys, sentence):
    (line,) = capsys.readouterr().err.split("\n")[1:-1]
    assert re.match(sentence, line)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kdpkit devices"]


def gpus(*busy):
    return {f"gpu_{i}_utilization": value for i, value in enumerate(busy)}


@pytest.mark.parametrize(
    ("busy", "waits"), [((), False), ((49.0,), True), ((100.0, 50.0), False), ((100.0, 49.0), True)]
)
def test_a_gpu_waits_if_it_is_busy_for_less_than_half_as_long_as_another(busy, waits):
    assert bool(starving(gpus(*busy) | {"process_cpu_utilization": 1.0})) == waits


def test_without_nvml_one_sentence_reports_it_and_the_rest_is_read(monkeypatch, capsys):
    monkeypatch.setattr(_devices, "_gpus_of_backend", lambda: [0])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert fit(DeviceMonitor()).keys() >= HOST
    assert_reported_once(capsys, "`nvidia-ml-py` failed.*`pip install nvidia")


def test_each_epoch_has_the_readings_and_no_thread_is_left():
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.extend(threads()))
    history = fit(DeviceMonitor(), watch, epochs=3)
    assert history.keys() == {"loss", *HOST}  # a CPU does not report the memory it handed out
    assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in history.values())
    assert all(map(is_reading, HOST))
    assert not any(
        map(is_reading, ("loss", "learning_rate", "val_process_memory_gib", "gpu_accuracy"))
    )
    assert len(set(seen)) == 1
    assert threads() == []


def test_compilation_and_validation_are_left_out(read):
    now = {"steps": 0, "validates": False}

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now.update(steps=now["steps"] + 1, validates=False)
            time.sleep(0.01)

    class Validation(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            now["validates"] = True
            time.sleep(0.05)

    # The first step compiles.
    read(lambda: {"fan_utilization": 0.0 if now["steps"] > 1 and not now["validates"] else 99.0})
    data = ones(6)
    validation = (data["x"], data["y"])
    around = Steps(), DeviceMonitor(0.001), Validation()
    history = fit(*around, steps=6, validation_data=validation)
    assert history["fan_utilization"][0] == 0.0


def test_a_gpu_that_waits_is_reported_once_in_a_training(read, monkeypatch, capsys):
    read(lambda: gpus(98.0, 20.0))
    monitor = DeviceMonitor()
    fit(monitor)  # a reading or two are not enough for a warning
    monkeypatch.setattr(_devices, "_ENOUGH", 1)
    printed = "Epoch 1: a GPU waits.*gpu_0_utilization 98 %, gpu_1_utilization .*doctor --measure"
    for _ in range(2):
        fit(monitor)
        assert_reported_once(capsys, printed)


def test_a_source_that_fails_midway_is_reported_and_training_goes_on(read, capsys):
    def failing():
        if len(seen) < 2:
            return {"watts": 5.0}
        raise RuntimeError("GPU is lost")

    seen = []
    epochs = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: seen.append(epoch))
    read(failing, lambda: {"fan_utilization": 1.0})
    history = fit(epochs, DeviceMonitor(), epochs=4)
    assert_reported_once(capsys, "`failing` failed .*GPU is lost")
    assert history["watts"] == [5.0]
    assert history["fan_utilization"] == [1.0] * 4


def test_a_training_after_one_that_failed_has_one_thread(read):
    read(lambda: {"watts": 3})
    monitor = DeviceMonitor(1000.0)  # which would wake up late
    with pytest.raises(ZeroDivisionError):
        fit(monitor, keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: 1 // 0))
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.extend(threads()))
    assert fit(monitor, watch)["watts"] == [3.0, 3.0]
    assert len(seen) == 2
    assert threads() == []
