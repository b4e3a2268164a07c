"""What is under a checkpoint's name is complete; all else is as Keras' own callback does it."""

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


def test_saving_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.keras"
    model, callback = watched(), ModelCheckpoint(path)
    fit(model, callback, epochs=1)
    old = path.read_bytes()

    def no_space_left():
        assert path.read_bytes() == old
        raise OSError("no space left")

    model.layers[0].while_saving = no_space_left
    with pytest.raises(OSError, match="no space left"):
        fit(model, callback, epochs=1)
    assert path.read_bytes() == old
    assert names(tmp_path) == ["model.keras"]


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
