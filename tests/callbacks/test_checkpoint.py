"""What is under a checkpoint's name is complete; all else is as Keras' own callback does it."""

import signal
import textwrap

import keras
import numpy as np
import pytest

from kdpkit._internal import atomic_files, storage
from kdpkit.callbacks import ModelCheckpoint
from tests.processes import run_code

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


def test_saving_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.keras"
    model, callback = watched(), ModelCheckpoint(path)
    fit(model, callback, epochs=1)
    old = path.read_bytes()

    def no_space_left():
        raise OSError("no space left")

    model.layers[0].while_saving = no_space_left
    with pytest.raises(OSError, match="no space left"):
        fit(model, callback, epochs=1)
    assert path.read_bytes() == old
    assert names(tmp_path) == ["model.keras"]


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
    killed = run_code(textwrap.dedent(KILLED), tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # What it was writing is hidden, as from the shell's `*.keras`.
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["epoch-1.keras"]
    with keras.saving.custom_object_scope({"Watched": Watched}):
        assert keras.models.load_model(tmp_path / "epoch-1.keras").optimizer.iterations == 3


@pytest.mark.parametrize(("name", "weights_only"), KINDS)
def test_files_go_to_object_storage(remote, name, weights_only):
    pattern = f"{remote}/{{epoch}}/{name}"
    model, callback = watched(), ModelCheckpoint(pattern, save_weights_only=weights_only)
    fit(model, callback)
    assert callback.filepath == pattern
    for epoch in (1, 2):
        (path,) = storage.path(f"{remote}/{epoch}").glob("*")
        assert path.name == name
    trained = model.get_weights()
    with atomic_files.fetched(f"{remote}/1/{name}") as file:
        model.load_weights(file)
    assert not np.array_equal(trained[0], model.get_weights()[0])
    with atomic_files.fetched(path) as file:
        model.load_weights(file)
    np.testing.assert_array_equal(trained[0], model.get_weights()[0])
