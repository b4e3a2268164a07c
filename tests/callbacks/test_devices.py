import itertools
import math
import os
import re
import sys
import threading
import time

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit._internal import processes
from kdpkit.callbacks import DeviceMonitor, _devices
from kdpkit.callbacks._devices import is_reading, starving

from .falling_weight import falling_weight, ones

HOST = {"cpu_utilization", "memory_gib", "machine_cpu_utilization", "machine_memory_gib"}
PATIENCE = 60  # seconds; on a machine that is busy with something else


def fit(*callbacks, steps=4, epochs=2, model=None, **settings):
    model = model or falling_weight("sgd")
    return model.fit(**ones(steps), epochs=epochs, callbacks=[*callbacks], **settings).history


class Recorded:
    """Readings as a machine with GPUs gave them, one after the other and then again."""

    def __init__(self, *readings):
        self.calls = 0
        self._readings = itertools.cycle(readings)

    def __call__(self):
        self.calls += 1
        return next(self._readings)


class LongSteps(keras.callbacks.Callback):
    """Makes every step last until a source was read some times more."""

    def __init__(self, source, readings):
        super().__init__()
        self._source, self._readings = source, readings

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 as Keras calls it
        wanted, end = self._source.calls + self._readings, time.monotonic() + PATIENCE
        while self._source.calls < wanted:
            assert time.monotonic() < end, "the source is not read"
            time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kdpkit devices"]


# What readings come to.


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1))
def test_a_reading_counts_as_often_as_the_seconds_it_stands_for(readings):
    sums = {}
    for seconds, value in readings:
        _devices.add(sums, {"power_watts": value, "memory_gib": value}, seconds)
    each_second = [value for seconds, value in readings for _ in range(seconds)]
    assert _devices.values_of(sums) == {
        "power_watts": pytest.approx(np.mean(each_second)),
        "memory_gib": max(each_second),
    }


# Who waits.


@pytest.mark.parametrize(
    ("utilizations", "printed"),
    [
        ({}, ""),
        ({0: 50.0}, ""),
        ({0: 49.0}, "the GPU computed for 49 % of the time: the input does not come fast enough"),
        ({0: 100.0, 1: 50.0}, ""),  # half is not less than half
        ({0: 100.0, 1: 49.0}, "GPU 1 computed for 49 % of the time, and GPU 0 for 100 %"),
        ({0: 5.0, 1: 90.0, 2: 94.0, 3: 98.0}, "GPU 0 .* 5 % .* GPU 3 for 98 %"),
        ({0: 60.0, 1: 28.0, 2: 3.0}, "GPU 2 .* 3 % .* GPU 0 for 60 %"),
        ({0: 30.0, 1: 2.0}, "the GPUs computed for 30 % of the time at most"),
    ],
)
def test_a_gpu_waits_if_it_is_busy_for_less_than_half_as_long_as_another(utilizations, printed):
    sentence = starving(utilizations)
    if printed:
        assert re.match(printed, sentence)
        assert "`kdpkit.pipelines.measure(train)`" in sentence
    else:
        assert sentence == ""


# Which GPUs.


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a driver")  # noqa: PTH110
@pytest.mark.parametrize(
    ("is_installed", "sentence"),
    [
        (True, "cannot be used .NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
        (False, "`nvidia-ml-py` cannot be used .ModuleNotFound.*`pip install nvidia-ml-py`"),
    ],
)
def test_without_nvml_one_sentence_reports_it_and_the_rest_is_read(
    monkeypatch, is_installed, sentence
):
    monkeypatch.setattr(_devices, "_gpus_of_backend", lambda: [0])
    if is_installed:
        pytest.importorskip("pynvml")
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.warns(UserWarning, match=sentence) as warned:
        history = fit(DeviceMonitor())
    assert len(warned) == 1
    assert history.keys() >= HOST


def test_without_psutil_one_sentence_reports_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.warns(UserWarning, match="`psutil` cannot be used .*`pip install psutil`"):
        history = fit(DeviceMonitor())
    assert history.keys() == {"loss"}


# What the machine reports, for real.


def test_processor_and_memory_are_those_of_this_process():
    host = _devices._host()
    before = host()
    kept = np.ones(1 << 25)  # 256 MiB
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = host()
    assert kept.nbytes == 1 << 28
    assert after["memory_gib"] - before["memory_gib"] == pytest.approx(0.25, abs=0.05)
    assert 0 < after["cpu_utilization"] <= 110
    assert 0 < after["machine_cpu_utilization"] <= 100
    assert after["machine_memory_gib"] > 0.25


def test_each_epoch_has_the_readings_and_no_batch_has():
    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 as Keras calls it
            of_batches.update(logs)

    of_batches = set()
    history = fit(DeviceMonitor(), Watch(), epochs=3)
    assert of_batches == {"loss"}
    assert history.keys() == {"loss", *HOST}  # a CPU does not report the memory it handed out
    assert all(len(values) == 3 and all(map(math.isfinite, values)) for values in history.values())
    assert all(map(is_reading, HOST))
    assert not any(map(is_reading, ("loss", "learning_rate", "val_memory_gib", "gpu_accuracy")))


@pytest.mark.tensorflow
def test_replicas_on_tensorflow_train_with_it_in_fit_and_in_a_loop():
    from kdpkit.strategies import select_strategy
    from kdpkit.training import TrainingLoop

    with select_strategy("mirrored", devices=2).scope():
        model = falling_weight("sgd")
    assert fit(DeviceMonitor(), model=model).keys() > HOST
    import tensorflow as tf

    x = np.ones((8, 1), "float32")
    loop = TrainingLoop(model, optimizer="sgd", loss="mse", steps_per_loop=4)
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)
    history = loop.fit(data, epochs=2, callbacks=[DeviceMonitor()], verbose=0).history
    assert [len(values) for values in history.values()] == [2] * 5


@pytest.mark.jax
def test_a_loop_on_jax_trains_with_it():
    from kdpkit.batches import ArrayBatches
    from kdpkit.training import TrainingLoop

    x = np.ones((8, 1), "float32")
    loop = TrainingLoop(falling_weight("sgd"), optimizer="sgd", loss="mse")
    data = ArrayBatches((x, x), global_batch_size=2)
    history = loop.fit(data, epochs=2, callbacks=[DeviceMonitor()], verbose=0).history
    assert [len(values) for values in history.values()] == [2] * 5


# What counts.


def test_compilation_and_validation_are_left_out():
    class Phase(keras.callbacks.Callback):
        def __init__(self, **phases):
            super().__init__()
            for hook, phase in phases.items():
                setattr(self, hook, lambda *_, phase=phase, **__: now.append(phase))

    now = ["before"]
    watts = {"compiling": 1000.0, "training": 10.0, "validating": 500.0}
    before = Phase(
        on_epoch_begin="training", on_train_batch_begin="training", on_test_end="training"
    )
    after = Phase(on_test_begin="validating")

    class Compiling(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):  # noqa: ARG002 as Keras calls it
            self.is_first = True

        def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002 as Keras calls it
            if self.is_first:
                now.append("compiling")
                self.is_first = False
                time.sleep(0.05)

    monitor = DeviceMonitor(0.001, sources=[lambda: {"watts": watts.get(now[-1], 7777.0)}])
    data = ones(6)
    history = fit(
        before, monitor, after, Compiling(), steps=6, validation_data=(data["x"], data["y"])
    )
    assert history["watts"] == [10.0, 10.0]


def test_an_epoch_of_one_execution_has_readings_too():
    model = falling_weight("sgd", steps_per_execution=4)
    history = fit(DeviceMonitor(sources=[lambda: {"watts": 3}]), model=model, epochs=3)
    assert history["watts"] == [3.0, 3.0, 3.0]


# Reports of GPUs that wait.


def gpus(*busy):
    return {f"gpu_{i}_utilization": value for i, value in enumerate(busy)}


def test_a_gpu_that_waits_is_reported_once_in_a_training():
    source = Recorded(gpus(98.0, 20.0), gpus(94.0, 40.0))
    monitor = DeviceMonitor(0.001, sources=[source])
    printed = "Epoch 1: GPU 1 computed for .* % of the time, and GPU 0 for 9. %"
    for _ in range(2):
        with pytest.warns(UserWarning, match=printed) as warned:
            history = fit(monitor, LongSteps(source, 10))
        assert len(warned) == 1
    assert history["gpu_0_utilization"] == [pytest.approx(96, abs=2)] * 2


def test_nothing_is_reported_after_a_few_readings():
    monitor = DeviceMonitor(1000.0, sources=[lambda: gpus(98.0, 20.0)])  # one in each epoch
    assert fit(monitor)["gpu_1_utilization"] == [20.0, 20.0]


# What goes wrong.


@pytest.mark.parametrize("wrong", [{"watts": "many"}, RuntimeError("GPU is lost")])
def test_a_source_that_fails_midway_is_reported_and_training_goes_on(wrong):
    class Failing(Recorded):
        def __call__(self):
            super().__call__()
            if len(seen) < 2:
                return {"watts": 5.0}
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    seen = []
    epochs = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: seen.append(epoch))
    failing, fine = Failing({}), Recorded({"fan_utilization": 1.0})
    sources = [failing, fine]
    with pytest.warns(UserWarning, match="Failing.*NaN") as warned:
        history = fit(DeviceMonitor(0.001, sources=sources), epochs, LongSteps(fine, 2), epochs=4)
    assert len(warned) == 1
    assert history["watts"][0] == 5.0
    assert np.isnan(history["watts"][2:]).all()
    assert history["fan_utilization"] == [1.0] * 4
    assert len(history["loss"]) == 4


def test_no_thread_is_left_when_training_ends():
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.extend(threads()))
    fit(DeviceMonitor(), watch)
    assert len(set(seen)) == 1
    assert threads() == []


def fail(*_):
    raise ZeroDivisionError


def test_a_training_after_one_that_failed_has_one_thread_and_its_readings():
    monitor = DeviceMonitor(1000.0, sources=[lambda: {"watts": 3}])  # which would wake up late
    with pytest.raises(ZeroDivisionError):
        fit(monitor, keras.callbacks.LambdaCallback(on_epoch_end=fail))
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.extend(threads()))
    assert fit(monitor, watch)["watts"] == [3.0, 3.0]
    assert len(seen) == 2
    assert threads() == []


def test_other_processes_than_the_first_log_nothing_and_warn_under_their_number(monkeypatch):
    monkeypatch.setattr(processes, "_position", lambda: (3, 4))
    source = Recorded(gpus(10.0))
    with pytest.warns(UserWarning, match="Process 3: Epoch 1: the GPU computed for 10 %"):
        history = fit(DeviceMonitor(0.001, sources=[source]), LongSteps(source, 10))
    assert history.keys() == {"loss"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"interval_seconds": 0}, "`interval_seconds` must be above 0.*=0"),
        ({"sources": [{"watts": 1.0}]}, "`sources` must be functions of no argument.*watts"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        DeviceMonitor(**arguments)
