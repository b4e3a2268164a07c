"""States on disk are complete, and the newest complete one is found."""

import os
import pathlib
import random
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from kdpkit import checkpoints, testing
from kdpkit.checkpoints import CheckpointDirectory, Position, TrainingState
from tests.processes import run_code


def state(epoch=0, step=0, **arrays):
    return TrainingState(position=Position(epoch, step), arrays=arrays, notes={"best": 0.5})


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=4),
        arrays_of.arrays(
            st.sampled_from(["float32", "int64", "bool", "uint32", ml_dtypes.bfloat16]),
            arrays_of.array_shapes(min_dims=0, max_dims=3, max_side=3),
            elements=st.sampled_from([0, 1]),
        ),
        max_size=4,
    )
)
def test_what_was_saved_comes_back(tmp_path_factory, arrays):
    directory = CheckpointDirectory(tmp_path_factory.mktemp("states"))
    directory.save(TrainingState(position=Position(3, 4), arrays=arrays, notes={"a": [1, None]}))
    found = directory.latest()
    assert (found.position, found.notes) == (Position(3, 4), {"a": [1, None]})
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_the_newest_are_kept_and_the_order_is_that_of_training(remote):
    directory = CheckpointDirectory(remote, keep=2)
    assert directory.latest() is None
    for position in [(0, 9), (0, 10), (1, 0), (10, 0)]:
        directory.save(state(*position))
    assert [path.name[6:12] for path in directory.paths()] == ["000010", "000001"]
    assert CheckpointDirectory(remote).latest().position.epoch == 10


def content_of(found):
    """What a state has, with the types of its values."""
    arrays = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in found.arrays.items()}
    return repr((found.position, found.notes, sorted(arrays.items())))


@pytest.mark.tensorflow  # once: files are the same on both backends
@pytest.mark.parametrize("seed", range(30))
def test_no_damaged_state_is_read_as_another_or_ends_the_run(seed, tmp_path):
    weights = {"weight": np.arange(20.0), "bias": np.arange(3).astype(ml_dtypes.bfloat16)}
    directory, draw = CheckpointDirectory(tmp_path), random.Random(seed)
    older, newest = state(0, 1, **weights), state(0, 2, **weights)
    directory.save(older)
    path = directory.save(newest)
    content, at, size = bytearray(path.read_bytes()), draw.random(), draw.choice([1, 16, 512])
    first = int(at * len(content))
    if seed % 3 == 0:
        del content[first:]
    elif seed % 3 == 1:
        content[first] ^= 1 << draw.randrange(8)
    else:  # a block that was never written, or is another's
        stop = min(first + size, len(content))
        content[first:stop] = draw.choice([bytes, draw.randbytes])(stop - first)
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = directory.latest()
    assert content_of(found) == content_of(older if caught else newest)
    assert all(f"{path.name} is damaged or cannot" in str(w.message) for w in caught)


@pytest.mark.parametrize("put", [os.mkfifo, pathlib.Path.mkdir], ids=["pipe", "directory"])
def test_what_is_not_the_state_that_its_name_says_is_skipped(put, tmp_path):
    directory = CheckpointDirectory(tmp_path)
    directory.save(state(0, 1))
    put(tmp_path / "state-000000-000000002.npz")
    with pytest.warns(UserWarning, match="2.npz is damaged or cannot be read"):
        assert directory.latest().position.step == 1
    (tmp_path / "state-000000-000000001.npz").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="Move"):
        directory.latest()


def test_what_a_killed_process_left_behind_is_no_state_and_goes(tmp_path):
    (tmp_path / ".state-000000-000000009-abc.npz").write_bytes(b"part")
    directory = CheckpointDirectory(tmp_path)
    assert directory.latest() is None
    directory.save(state())
    assert [path.name for path in tmp_path.iterdir()] == ["state-000000-000000000.npz"]


ENDING = """
import sys
import numpy as np
from kdpkit.checkpoints import CheckpointDirectory, Position, TrainingState

arrays = {"weight": np.zeros(2_000_000)}
for directory in sys.argv[1:]:
    state = TrainingState(position=Position(0, 1), arrays=arrays)
    CheckpointDirectory(directory).save_in_background(state)
raise RuntimeError("training failed")
"""


@pytest.mark.tensorflow  # once
def test_a_program_that_fails_ends_when_all_is_written_and_reports_what_is_not(tmp_path):
    (tmp_path / "file").touch()
    states = tmp_path / "states", tmp_path / "file" / "states"
    ended = run_code(ENDING, *states, KERAS_BACKEND="numpy", check=False)
    assert ended.returncode == 1
    assert "training failed" in ended.stderr
    assert "could not be saved" in ended.stderr
    assert CheckpointDirectory(tmp_path / "states").latest().position == Position(0, 1)


def test_bad_directories_raise(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="A directory is needed, and this is a file"):
        CheckpointDirectory(tmp_path / "file")
    for nowhere in (None, 3, ""):
        with pytest.raises(ValueError, match="`directory` must be the path of a directory"):
            CheckpointDirectory(nowhere)
    with pytest.raises(ValueError, match="`keep` must be a positive integer.*keep=0"):
        CheckpointDirectory(tmp_path, keep=0)


# What was read stays as it was, though reading copies nothing on a CPU.


@pytest.mark.parametrize(("optimizer", "jit_compile"), [("adam", False), ("sgd", True)])
def test_steps_do_not_change_values_that_were_read(optimizer, jit_compile):
    """Of a model with an embedding, whose gradient has few rows, and statistics."""
    if optimizer == "sgd":
        averages = keras.backend.backend() != "jax"  # upstream/keras_jax_ema_shares_arrays.py
        optimizer = keras.optimizers.SGD(momentum=0.9, use_ema=averages)
    layers = keras.layers
    first = [layers.Embedding(2000, 4), layers.Flatten(), layers.BatchNormalization()]
    last = [layers.Dropout(0.5, seed=1), layers.Dense(3)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *first, *last])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    x = np.arange(24, dtype="int32").reshape(8, 3)

    def fit():
        model.fit(x, np.arange(8) % 3, batch_size=4, epochs=2, verbose=0)

    fit()
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    for _ in range(2):  # the second time, TensorFlow has chosen how it updates the embedding
        read = checkpoints.values_of({"model": variables})
        copies = {name: value.copy() for name, value in read.items()}
        fit()
        now = checkpoints.values_of({"model": variables})
        np.testing.assert_equal(read, copies)
        assert sum((now[name] != read[name]).any() for name in read) >= 8
    for _ in range(2):  # nor do steps after these values were assigned
        checkpoints.assign({"model": variables}, read)
        np.testing.assert_equal(checkpoints.values_of({"model": variables}), copies)
        fit()


def test_values_of_another_model_raise_and_change_nothing():
    saved = checkpoints.values_of({"model": testing.tiny_classifier().variables})
    model = testing.tiny_classifier(classes=4)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"does not fit the model.*\(8, 4\).*\(8, 3\)"):
        checkpoints.assign({"model": model.variables}, saved)
    np.testing.assert_equal(model.get_weights(), before)
