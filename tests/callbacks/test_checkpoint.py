"""What is under a checkpoint's name is complete; all else is as Keras' own callback does it."""

import inspect
import pathlib
import signal
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

from kdpkit._internal import atomic_files, storage
from kdpkit.callbacks import ModelCheckpoint

KINDS = [("model.keras", False), ("model.weights.h5", True)]


class Watched(keras.layers.Dense):
    """A layer that calls `while_saving` when a part of the file is written."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        self.while_saving()


def watched(while_saving=lambda: None):
    layer = Watched(1)
    layer.while_saving = while_saving
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model, *callbacks, epochs=2, **arguments):
    x = np.ones((6, 1), "float32")
    data = {"batch_size": 2, "verbose": 0, "validation_data": (x, x)} | arguments
    return model.fit(x, x, epochs=epochs, callbacks=list(callbacks), **data)


def names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.*"))


@pytest.mark.parametrize(("name", "weights_only"), KINDS)
def test_the_name_is_taken_when_the_file_is_complete(tmp_path, name, weights_only):
    path, seen = tmp_path / name, []
    model = watched(lambda: seen.append(path.read_bytes() if path.exists() else None))
    fit(model, ModelCheckpoint(path, save_weights_only=weights_only))
    first, second = seen
    assert first is None
    path.with_name(f"epoch-1-{name}").write_bytes(second)
    model.load_weights(path.with_name(f"epoch-1-{name}"))
    trained = model.get_weights()
    model.load_weights(path)
    assert not np.array_equal(trained[0], model.get_weights()[0])


@pytest.mark.parametrize(("name", "weights_only"), KINDS)
def test_saving_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, name, weights_only):
    path = tmp_path / name
    model, callback = watched(), ModelCheckpoint(path, save_weights_only=weights_only)
    fit(model, callback, epochs=1)
    old = path.read_bytes()

    def no_space_left():
        raise OSError("no space left")

    model.layers[0].while_saving = no_space_left
    with pytest.raises(OSError, match="no space left"):
        fit(model, callback, epochs=1)
    assert path.read_bytes() == old
    assert names(tmp_path) == [name]


KILLED = """
    import os, signal, sys
    from kdpkit.callbacks import ModelCheckpoint
    from tests.callbacks.test_checkpoint import fit, watched

    saves = []
    def kill_at_the_second():
        saves.append(1)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(watched(kill_at_the_second), ModelCheckpoint(sys.argv[1] + "/epoch-{epoch}.keras"))
"""


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_complete_files(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path]
    killed = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # What it was writing is hidden, as from the shell's `*.keras`.
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["epoch-1.keras"]
    with keras.saving.custom_object_scope({"Watched": Watched}):
        assert keras.models.load_model(tmp_path / "epoch-1.keras").optimizer.iterations == 3


SETTINGS = [
    ("epoch-{epoch:02d}-{val_loss:.4f}.keras", {}),
    ("best.keras", {"save_best_only": True, "monitor": "loss"}),
    ("a/{epoch}/b.weights.h5", {"save_weights_only": True}),
    ("step-{epoch}-{batch}.keras", {"save_freq": 2}),
    ("old.h5", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_names_lines_and_choice_are_those_of_keras(tmp_path, capsys, name, settings):
    printed, callbacks = [], []
    for kind in (keras.callbacks.ModelCheckpoint, ModelCheckpoint):
        keras.utils.set_random_seed(0)
        callback = kind(tmp_path / kind.__module__ / name, verbose=1, **settings)
        fit(watched(), callback, epochs=3)
        printed.append(capsys.readouterr().out.replace(kind.__module__, ""))
        callbacks.append(callback)
    theirs, ours = callbacks
    assert printed[1] == printed[0] != ""
    assert ours.best == theirs.best
    keras_files, our_files = (names(tmp_path / type(c).__module__) for c in callbacks)
    assert our_files == keras_files != []


def test_it_takes_the_arguments_of_keras_and_is_its_callback():
    assert issubclass(ModelCheckpoint, keras.callbacks.ModelCheckpoint)
    assert inspect.signature(ModelCheckpoint) == inspect.signature(keras.callbacks.ModelCheckpoint)


def test_its_model_is_the_model(tmp_path):
    seen = []

    class Subclass(ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            seen.append(self.model)

    model, callback = watched(), Subclass(tmp_path / "model.keras")
    fit(model, callback)
    assert all(each is model for each in [*seen, callback.model])
    assert len(seen) == 2


def test_a_model_that_saves_in_its_own_way_is_asked_as_keras_asks(tmp_path):
    asked = []

    class OwnWay(keras.Sequential):
        def save(self, filepath, overwrite=True):
            asked.append((type(filepath), overwrite))
            super().save(filepath, overwrite)

    model = OwnWay([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fit(model, ModelCheckpoint(tmp_path / "model.keras"), epochs=1)
    assert asked == [(str, True)]
    assert names(tmp_path) == ["model.keras"]


def test_a_directory_of_the_files_name_is_reported(tmp_path):
    (tmp_path / "model.keras").mkdir()
    with pytest.raises(OSError, match=r"existing directory: .*model\.keras"):
        fit(watched(), ModelCheckpoint(tmp_path / "model.keras"))
    assert names(tmp_path) == ["model.keras"]


@pytest.mark.parametrize(("name", "weights_only"), KINDS)
def test_files_go_to_object_storage_under_the_name_and_lines_of_keras(
    remote, capsys, name, weights_only
):
    pattern = f"{remote}/{{epoch}}/{name}"
    model, callback = watched(), ModelCheckpoint(pattern, save_weights_only=weights_only, verbose=1)
    fit(model, callback)
    assert callback.filepath == pattern
    shown = capsys.readouterr().out
    for epoch in (1, 2):
        assert f"Epoch {epoch}: saving model to {remote}/{epoch}/{name}" in shown
        (path,) = storage.path(f"{remote}/{epoch}").iterdir()
        assert path.name == name
    trained = model.get_weights()
    with atomic_files.fetched(f"{remote}/1/{name}") as file:
        model.load_weights(file)
    assert not np.array_equal(trained[0], model.get_weights()[0])
    with atomic_files.fetched(path) as file:
        model.load_weights(file)
    np.testing.assert_array_equal(trained[0], model.get_weights()[0])


def test_a_scheme_that_pathlib_has_cut_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Pass it as text: 'gs://bucket/m.keras'"):
        ModelCheckpoint(pathlib.Path("gs://bucket/m.keras"))
