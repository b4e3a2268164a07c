import itertools
import sys

import keras
import numpy as np
import pytest

from kdpkit._internal import storage
from kdpkit.callbacks import (
    DeviceMonitor,
    LearningRateLogger,
    PrintLR,
    TensorBoard,
    Throughput,
    training_callbacks,
)

from .falling_weight import SetRate, falling_weight, ones, straight_decay


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        values = {e.step: make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}
        found[tag] = {
            step: float(value) for step, value in values.items() if value.dtype == np.float32
        }
    return {tag: values for tag, values in found.items() if values}


def fit(callbacks, *, steps=5, epochs=2, validate=True, **compile_arguments):
    data = ones(steps)
    model = falling_weight(keras.optimizers.SGD(straight_decay()), **compile_arguments)
    validation = (data["x"], data["y"]) if validate else None
    model.fit(**data, epochs=epochs, validation_data=validation, callbacks=callbacks)
    return model


def test_the_applied_rate_is_written_and_history_beside_it(tmp_path):
    model = fit([LearningRateLogger(), Throughput(2), TensorBoard(tmp_path)])
    history, train = model.history.history, scalars(tmp_path / "train")
    assert train["epoch_learning_rate"] == pytest.approx({0: 0.96, 1: 0.91})
    for name in ("loss", "steps_per_second", "examples_per_second"):
        assert list(train[f"epoch_{name}"].values()) == pytest.approx(history[name])
    validation = scalars(tmp_path / "validation")
    assert list(validation["epoch_loss"].values()) == pytest.approx(history["val_loss"])


@pytest.mark.parametrize(("rate", "accumulation"), [(0.5, 2), (straight_decay(), None)])
def test_batches_have_the_applied_rate_at_the_optimizers_number_of_batches(
    tmp_path, rate, accumulation
):
    values = (0.5 - 0.01 * step for step in itertools.count())
    setting = [SetRate("on_train_batch_begin", values)] * (rate == 0.5)
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=accumulation)
    model = falling_weight(optimizer)
    model.fit(**ones(5), epochs=2, callbacks=[TensorBoard(tmp_path, update_freq=2), *setting])
    written = scalars(tmp_path / "train")
    of_batch = {2: 1, 4: 3, 6: 5, 8: 7, 10: 9}  # the last update's index, from 0
    expected = {n: 0.5 - 0.01 * i if rate == 0.5 else 1 - i / 100 for n, i in of_batch.items()}
    assert written["batch_learning_rate"] == pytest.approx(expected)
    assert written["batch_loss"].keys() == expected.keys()


@pytest.mark.tensorflow
@pytest.mark.parametrize("update_freq", ["epoch", "batch", 5])
def test_all_but_the_rate_is_what_keras_callback_writes(tmp_path, update_freq):
    ours, keras_own = tmp_path / "ours", tmp_path / "keras"
    keras.utils.set_random_seed(0)
    settings = {"update_freq": update_freq}
    fit([TensorBoard(ours, **settings), keras.callbacks.TensorBoard(keras_own, **settings)])
    for run in ("train", "validation"):
        expected = scalars(keras_own / run)
        rate = expected.pop("epoch_learning_rate", None)
        expected.pop("evaluation_loss_vs_iterations", None)
        written = scalars(ours / run)
        # With 3 Keras leaves out epochs that end between two of these.
        in_batches = update_freq != "epoch" and run == "train"
        assert bool(written.pop("batch_learning_rate", None)) == in_batches
        assert written.pop("epoch_learning_rate", None) != rate or rate is None
        assert written == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("log_dir", ""), ("log_dir", 5), *(("update_freq", value) for value in ("batches", 0, 1.5))],
)
def test_a_path_or_frequency_that_is_none_is_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*{value!r}"):
        TensorBoard(**{"log_dir": tmp_path, name: value})


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(ImportError, match="tensorboard"):
        TensorBoard(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("remote", ["memory"], indirect=True)
def test_scalars_are_in_object_storage_at_the_end_of_every_epoch(remote):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002 as Keras calls it
            for path in storage.path(f"{remote}/logs/train").glob("events*"):
                with storage.fetched(path) as local:
                    seen.append([*scalars(local).get("epoch_loss", ())])

    fit([TensorBoard(f"{remote}/logs"), Look()], epochs=3)
    assert seen == [[], [0], [0, 1]]
    for run in ("train", "validation"):
        (path,) = storage.path(f"{remote}/logs/{run}").glob("*")
        with storage.fetched(path) as file:
            assert [*scalars(file)["epoch_loss"]] == [0, 1, 2]


def test_the_usual_set_writes_what_it_measures_and_leaves_training_as_it_is(tmp_path):
    usual = training_callbacks(tmp_path, global_batch_size=2, tokens_per_example=3)
    kinds = [LearningRateLogger, PrintLR, Throughput, DeviceMonitor, TensorBoard]
    assert [type(each) for each in usual[1:]] == kinds
    np.testing.assert_equal(fit(usual).get_weights(), fit([]).get_weights())
    written = scalars(tmp_path / "train")
    speeds = {f"epoch_{unit}_per_second" for unit in ("steps", "examples", "tokens")}
    assert (
        speeds | {"device/process_cpu_utilization", "device/process_memory_gib"} <= written.keys()
    )
    assert written["device/process_memory_gib"].keys() == {0, 1}
