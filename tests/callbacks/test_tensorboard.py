import os
import pathlib
import shutil
import sys

import keras
import numpy as np
import pytest

from kdpkit import scaling
from kdpkit._internal import atomic_files, storage
from kdpkit.callbacks import (
    DeviceMonitor,
    LearningRateLogger,
    PrintLR,
    ProgressLine,
    TensorBoard,
    Throughput,
    training_callbacks,
)

from .falling_weight import falling_weight, ones

needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="drawn by TensorFlow"
)


def decay():
    return keras.optimizers.schedules.PolynomialDecay(1.0, 100, end_learning_rate=0.0)


def scalars(directory):
    """Read the event files of one run: tag -> {step: value}."""
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
    model = falling_weight(keras.optimizers.SGD(decay()), **compile_arguments)
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


def test_the_rate_needs_no_other_callback_and_none_is_written_before_an_update(tmp_path):
    optimizer = keras.optimizers.SGD(decay(), gradient_accumulation_steps=4)
    falling_weight(optimizer).fit(**ones(3), epochs=2, callbacks=[TensorBoard(tmp_path)])
    assert scalars(tmp_path / "train")["epoch_learning_rate"] == pytest.approx({1: 0.97})


@needs_tensorflow
def test_all_but_the_rate_is_what_keras_callback_writes(tmp_path):
    ours, keras_own = tmp_path / "ours", tmp_path / "keras"
    keras.utils.set_random_seed(0)
    fit([TensorBoard(ours), keras.callbacks.TensorBoard(keras_own)])
    for run in ("train", "validation"):
        expected = scalars(keras_own / run)
        rate = expected.pop("epoch_learning_rate", None)
        written = scalars(ours / run)
        assert written.pop("epoch_learning_rate", None) != rate or rate is None
        assert written == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps_per_execution", "steps"), [(1, [2, 4, 6, 8, 10]), (3, [3, 5, 8, 10])]
)
def test_every_second_batch_is_written_at_the_batches_seen(tmp_path, steps_per_execution, steps):
    fit([TensorBoard(tmp_path, update_freq=2)], steps_per_execution=steps_per_execution)
    assert sorted(scalars(tmp_path / "train")["batch_loss"]) == steps


def test_batch_is_every_batch_and_has_what_earlier_callbacks_log(tmp_path):
    fit(
        [LearningRateLogger("batch"), TensorBoard(tmp_path, update_freq="batch")], steps=3, epochs=1
    )
    written = scalars(tmp_path / "train")["batch_learning_rate"]
    assert written == pytest.approx({1: 1.0, 2: 0.99, 3: 0.98})


def test_runs_stand_side_by_side_and_a_second_fit_goes_on(tmp_path):
    boards = [TensorBoard(tmp_path, run_name=name, update_freq=1) for name in ("a", "b")]
    model = fit(boards[:1], epochs=1)
    model.fit(**ones(5), callbacks=boards[:1])
    fit(boards[1:], epochs=1)
    assert sorted(scalars(tmp_path / "a" / "train")["batch_loss"]) == list(range(1, 11))
    assert scalars(tmp_path / "b" / "train")["epoch_loss"].keys() == {0}


def test_evaluate_alone_writes_and_closes_its_file(tmp_path):
    model, data = fit([], epochs=1), ones(5)
    loss = model.evaluate(data["x"], data["y"], verbose=0, callbacks=[TensorBoard(tmp_path)])
    written = scalars(tmp_path / "validation")["evaluation_loss_vs_iterations"]
    assert written == {5: pytest.approx(loss)}


@pytest.mark.slow
@needs_tensorflow
def test_two_replicas_write_once(tmp_path):
    from kdpkit.strategies import select_strategy

    with select_strategy("mirrored", devices=2).scope():
        model = falling_weight(keras.optimizers.SGD(decay()))
    model.fit(**ones(4), epochs=2, callbacks=[TensorBoard(tmp_path)])
    assert scalars(tmp_path / "train")["epoch_learning_rate"] == pytest.approx({0: 0.97, 1: 0.93})
    assert len(list((tmp_path / "train").iterdir())) == 1


@needs_tensorflow
def test_a_model_that_keeps_its_own_optimizer_is_written_without_a_rate(tmp_path):
    class Own(keras.Model):
        def call(self, x):
            return x

        def train_step(self, _):
            return {"own": 2.0}

    model = Own()
    model.compile(optimizer=None)
    model.fit(**ones(3), callbacks=[TensorBoard(tmp_path), Throughput(2)])
    assert scalars(tmp_path / "train") == {"epoch_own": {0: 2.0}}


@pytest.mark.slow
@needs_tensorflow
def test_histograms_are_drawn_by_keras_as_a_run_of_their_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def drawn(directory, callback):
        keras.utils.clear_session(free_memory=False)  # names start again
        fit([callback])
        events = EventAccumulator(str(directory / "train"))
        events.Reload()
        return {tag for tag in events.Tags()["tensors"] if not tag.startswith("epoch_")}

    wanted = {"histogram_freq": 1, "write_graph": True}
    ours = drawn(tmp_path / "drawings", TensorBoard(tmp_path, **wanted))
    assert ours == drawn(
        tmp_path / "keras", keras.callbacks.TensorBoard(tmp_path / "keras", **wanted)
    )
    assert "keras" in ours
    assert any(tag.endswith("kernel/histogram") for tag in ours)
    assert scalars(tmp_path / "train")["epoch_learning_rate"] == pytest.approx({0: 0.96, 1: 0.91})


@pytest.mark.jax
def test_drawings_raise_on_jax(tmp_path):
    with pytest.raises(ValueError, match="`histogram_freq` is drawn by TensorFlow.*jax backend"):
        TensorBoard(tmp_path, histogram_freq=1)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(ImportError, match="`pip install tensorboard`"):
        TensorBoard(tmp_path)


def test_a_log_dir_that_is_a_file_raises_before_training(tmp_path):
    file = tmp_path / "logs"
    file.touch()
    for directory in (file, file / "run"):
        with pytest.raises(OSError, match=f"{directory}"):
            TensorBoard(directory)


def _download(path, directory):
    with atomic_files.fetched(path) as local:
        shutil.copy(local, directory / path.name)


@pytest.mark.slow
def test_scalars_are_in_object_storage_at_the_end_of_every_epoch(remote, tmp_path):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002 as Keras calls it
            for path in storage.path(f"{remote}/logs/first/train").glob("events*"):
                _download(path, tmp_path)
                seen.append([*scalars(tmp_path / path.name).get("epoch_loss", ())])

    board = TensorBoard(f"{remote}/logs", run_name="first", hyperparameters=ASKED_FOR)
    fit([board, Look()], epochs=3)
    (path,) = storage.path(f"{remote}/logs/first").glob("events*")
    (tmp_path / "run").mkdir()
    _download(path, tmp_path / "run")
    assert "hyperparameters" in events_of_run(tmp_path / "run")
    assert seen == [[], [0], [0, 1]]
    for run in ("train", "validation"):
        (path,) = storage.path(f"{remote}/logs/first/{run}").iterdir()
        with atomic_files.fetched(path) as file:
            assert [*scalars(file)["epoch_loss"]] == [0, 1, 2]


def test_a_storage_that_fails_during_training_is_warned_of_and_written_later(tmp_path):
    place = tmp_path / "logs"

    class Disturb(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002 as Keras calls it
            if epoch == 1:
                place.rename(tmp_path / "away")
                place.touch()
            if epoch == 2:
                place.unlink()
                (tmp_path / "away").rename(place)

    board = TensorBoard(f"file://{place}")
    with pytest.warns(
        UserWarning, match="file://.*/logs.*next epoch, if there is one, tries again"
    ):
        fit([board, Disturb()], epochs=3)
    assert [*scalars(place / "train")["epoch_loss"]] == [0, 1, 2]


@needs_tensorflow
def test_what_keras_draws_needs_a_scheme_of_tensorflow():
    with pytest.raises(ValueError, match="does not know memory://.*memory://logs"):
        TensorBoard("memory://logs", write_graph=True)


@pytest.mark.parametrize(
    ("log_dir", "sentence"),
    [
        ("nope://bucket/logs", "nope://.*nope://bucket/logs"),
        ("file:///sys/kernel/logs", "file:///sys/kernel/logs.*Check"),
    ],
)
def test_a_log_dir_that_cannot_be_written_in_object_storage_raises(log_dir, sentence):
    with pytest.raises(ValueError, match=sentence):
        TensorBoard(log_dir)


@pytest.mark.parametrize("run_name", ["/tmp/elsewhere", "a/../../elsewhere", 5])
def test_a_run_name_that_leaves_the_log_dir_raises(tmp_path, run_name):
    with pytest.raises(ValueError, match="`run_name` must be"):
        TensorBoard(tmp_path / "logs", run_name=run_name)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_log_dir_that_cannot_be_written_raises_before_training(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=f"{tmp_path}"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"log_dir": None}, "`log_dir` must be the path of a directory.*None"),
        ({"hyperparameters": [1]}, "`hyperparameters` must be values by name.*=.1."),
        ({"update_freq": 0}, "`update_freq`.*0"),
    ],
)
def test_bad_arguments_get_one_sentence(tmp_path, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        TensorBoard(**{"log_dir": tmp_path, **arguments})


@pytest.mark.slow
def test_the_usual_set_writes_what_it_measures_because_of_its_order(tmp_path):
    usual = training_callbacks(tmp_path / "usual", global_batch_size=2, tokens_per_example=3)
    measuring = [LearningRateLogger, Throughput, DeviceMonitor]
    assert [type(each) for each in usual] == [*measuring, ProgressLine, PrintLR, TensorBoard]
    turned = training_callbacks(tmp_path / "turned", global_batch_size=2, tokens_per_example=3)
    fit(usual)
    fit(turned[::-1])
    speeds = {f"epoch_{unit}_per_second" for unit in ("steps", "examples", "tokens")}
    devices = {"device/cpu_utilization", "device/memory_gib"}
    written = scalars(tmp_path / "usual" / "train")
    assert speeds | devices <= written.keys()
    assert written["device/memory_gib"].keys() == {0, 1}
    assert not (speeds | devices) & scalars(tmp_path / "turned" / "train").keys()


PLAN = scaling.ScalePlan(replicas=2, per_replica_batch_size=32, base_learning_rate=1e-4)
ASKED_FOR = {"plan": PLAN, "dropout": np.float32(0.25), "layers": 2, "tied": True, "note": "a|b"}


def events_of_run(directory):
    """Read what stands above the curves of training and validation: tag -> its last value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (path for path in directory.iterdir() if path.is_file())
    events = EventFileLoader(str(file)).Load()
    return {value.tag: value for event in events for value in event.summary.value}


def test_hyperparameters_are_in_the_hparams_table_and_in_a_text(tmp_path):
    from tensorboard.plugins.hparams import api_pb2, metadata

    fit(training_callbacks(tmp_path, hyperparameters=ASKED_FOR), epochs=1)
    found = events_of_run(tmp_path)
    begin = metadata.parse_session_start_info_plugin_data(
        found[metadata.SESSION_START_INFO_TAG].metadata.plugin_data.content
    )
    written = {
        name: getattr(value, value.WhichOneof("kind")) for name, value in begin.hparams.items()
    }
    assert written == {
        "plan.replicas": 2,
        "plan.per_replica_batch_size": 32,
        "plan.base_learning_rate": 1e-4,
        "plan.rule": "linear",
        "plan.accumulation": 1,
        "plan.global_batch_size": 64,
        "plan.effective_batch_size": 64,
        "plan.factor": 2,
        "plan.learning_rate": 2e-4,
        "dropout": 0.25,
        "layers": 2,
        "tied": True,
        "note": "a|b",
    }
    assert isinstance(written["tied"], bool)
    end = metadata.parse_session_end_info_plugin_data(
        found[metadata.SESSION_END_INFO_TAG].metadata.plugin_data.content
    )
    assert end.status == api_pb2.STATUS_SUCCESS
    (text,) = found["hyperparameters"].tensor.string_val
    assert text.decode().splitlines()[:3] == [
        "| name | value |",
        "| --- | --- |",
        "| plan.replicas | 2 |",
    ]
    assert "| note | a\\|b |" in text.decode()
    assert scalars(tmp_path / "train")["epoch_loss"].keys() == {0}


def test_a_run_that_fails_has_its_hyperparameters_and_no_end(tmp_path):
    from tensorboard.plugins.hparams import metadata

    def fail(*_):
        raise ZeroDivisionError

    board = TensorBoard(tmp_path, hyperparameters=ASKED_FOR)
    with pytest.raises(ZeroDivisionError):
        fit([board, keras.callbacks.LambdaCallback(on_epoch_end=fail)])
    found = events_of_run(tmp_path)
    assert metadata.SESSION_START_INFO_TAG in found
    assert metadata.SESSION_END_INFO_TAG not in found


def test_a_scheme_that_pathlib_has_cut_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Pass it as text: 'gs://bucket/logs'"):
        TensorBoard(pathlib.Path("gs://bucket/logs"))


def test_a_slash_at_the_end_of_the_directory_changes_nothing():
    assert TensorBoard("memory://logs/", run_name="one")._run_dir == "memory://logs/one"
