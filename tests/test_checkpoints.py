"""States on disk are complete, and the newest complete one is found."""

import functools
import json
import resource
import shutil
import time
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from kdpkit import checkpoints, testing
from kdpkit._internal import atomic_files
from kdpkit.checkpoints import CheckpointDirectory, Position, TrainingState
from tests import damaged_states


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


def test_the_newest_are_kept_and_the_order_is_that_of_training(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=2)
    for position in [(0, 9), (0, 10), (1, 0), (10, 0)]:
        directory.save(state(*position))
    assert [path.name for path in directory.paths()] == [
        "state-000010-000000000.npz",
        "state-000001-000000000.npz",
    ]
    assert CheckpointDirectory(tmp_path).latest().position.epoch == 10


def test_an_empty_or_missing_directory_has_no_state(tmp_path):
    assert CheckpointDirectory(tmp_path).latest() is None
    assert CheckpointDirectory(tmp_path / "none").latest() is None


def content_of(found):
    """What a state has, with the types of its values."""
    arrays = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in found.arrays.items()}
    return repr((found.position, found.notes, sorted(arrays.items())))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 5_000), marks=pytest.mark.exhaustive)], ids=len
)
def test_no_damaged_state_is_read_as_another_or_ends_the_run(seeds, tmp_path):
    """None takes long or fills the memory either; and the run saves further states."""
    weights = {"weight": np.arange(20.0), "bias": np.arange(3).astype(ml_dtypes.bfloat16)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        directory = CheckpointDirectory(tmp_path / str(seed))
        older, newest = state(0, 1, **weights), state(0, 2, **weights)
        directory.save(older)
        path = directory.save(newest)
        kind = damaged_states.damage(seed, path, path.read_bytes())
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = directory.latest()
        assert time.monotonic() - began < 10, (seed, kind)
        expected = older if caught else newest
        assert content_of(found) == content_of(expected), (seed, kind)
        assert all(f"{path.name} is damaged or cannot" in str(w.message) for w in caught)
        directory.save(state(0, 3, **weights))
        assert directory.latest().position.step == 3, (seed, kind)
        shutil.rmtree(tmp_path / str(seed))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (1 << 28) / 1024, grown  # in KiB on Linux


def test_where_all_are_damaged_nothing_starts_again_silently(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    directory.save(state(0, 1)).write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="Move"):
        directory.latest()


def test_a_state_is_not_removed_for_damaged_ones_of_later_steps(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (8, 9):
        directory.save(state(0, step)).write_bytes(b"")
    for step in (1, 2):
        assert directory.save(state(0, step)).exists()
    assert directory.latest().position.step == 2


def test_what_a_killed_process_left_behind_is_no_state_and_goes(tmp_path):
    (tmp_path / ".state-000000-000000009-abc.npz").write_bytes(b"part")
    directory = CheckpointDirectory(tmp_path)
    assert directory.latest() is None
    directory.save(state())
    assert [path.name for path in tmp_path.iterdir()] == ["state-000000-000000000.npz"]


def test_a_full_disk_loses_nothing(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    directory.save(state(0, 1, weight=np.zeros(10)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            directory.save(state(0, 2, weight=np.zeros(1 << 14)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert directory.latest().position.step == 1
    assert len([*tmp_path.iterdir()]) == 1


def test_a_format_of_later_versions_is_not_guessed_at(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    path = directory.save(state())
    with np.load(path) as file:
        header = json.loads(str(file["header"])) | {"format": 2}
    np.savez(path, header=np.array(json.dumps(header)))
    with pytest.raises(ValueError, match="another version of kdpkit.*format=2"):
        directory.latest()


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


def stepping(optimizer, **settings):
    """A model with an embedding, whose gradient has few rows, and statistics; and its data."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(2000, 4),
            layers.Flatten(),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    x = np.arange(24, dtype="int32").reshape(8, 3)
    return model, (x, np.arange(8) % 3)


def assert_read_values_stay(model, data):
    def fit():
        model.fit(*data, batch_size=4, epochs=2, verbose=0)

    fit()
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    for _ in range(2):  # the second time, TensorFlow has chosen how it updates the embedding
        read = checkpoints.values_of({"model": variables})
        copies = {name: value.copy() for name, value in read.items()}
        fit()
        now = checkpoints.values_of({"model": variables})
        for name, value in read.items():
            np.testing.assert_array_equal(value, copies[name])
        assert sum((now[name] != read[name]).any() for name in read) >= 8
    for _ in range(2):  # nor do steps after these values were assigned
        checkpoints.assign({"model": variables}, read)
        for name, value in checkpoints.values_of({"model": variables}).items():
            np.testing.assert_array_equal(value, copies[name])
        fit()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor", "ftrl", "lion"])
def test_steps_do_not_change_values_that_were_read(optimizer, jit_compile):
    if optimizer == "sgd":
        optimizer = keras.optimizers.SGD(momentum=0.9, use_ema=True)
    assert_read_values_stay(*stepping(optimizer, jit_compile=jit_compile))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_steps_on_two_replicas_do_not_change_values_that_were_read():
    from kdpkit import strategies

    with strategies.select_strategy("mirrored", devices=2).scope():
        assert_read_values_stay(*stepping("adam"))


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_steps_on_four_devices_do_not_change_values_that_were_read(shard):
    from kdpkit import sharding

    before = keras.distribution.distribution()
    keras.distribution.set_distribution(sharding.DataParallel(4, shard=shard))
    try:
        assert_read_values_stay(*stepping("adam"))
    finally:
        keras.distribution.set_distribution(before)


@pytest.mark.tensorflow
@pytest.mark.parametrize("by_xla", [False, True])
@pytest.mark.parametrize("writes_in_place", [False, True])
def test_no_operation_of_tensorflow_changes_values_that_were_read(by_xla, writes_in_place):
    import tensorflow as tf

    raw, one = tf.raw_ops, np.ones((5, 2), "float32")

    def some(row):
        return tf.IndexedSlices(tf.ones((1, 2)), [row])

    def run(operation, variable):
        operation(variable)

    operations = [
        lambda v: v.assign(2 * v),
        lambda v: v.assign_add(one),
        lambda v: v.assign_sub(one),
        lambda v: v[1:3].assign(one[:2]),
        lambda v: v.scatter_update(some(1)),
        lambda v: v.scatter_add(some(2)),
        lambda v: v.scatter_nd_update([[3]], one[:1]),
        lambda v: raw.ResourceApplyGradientDescent(var=v.handle, alpha=0.1, delta=one),
    ]
    if not by_xla:  # which does not have these
        operations += [
            lambda v: v.scatter_max(some(3)),
            lambda v: raw.ResourceSparseApplyAdagrad(
                var=v.handle, accum=v.handle, lr=0.1, grad=one[:1], indices=[4]
            ),
        ]
    for operation in operations:
        variable = keras.Variable(np.full((5, 2), 0.5, "float32"))
        if writes_in_place:  # from its first operation on rows on, TensorFlow copies when it reads
            variable.value.scatter_add(some(0))
        before = np.array(variable)
        read = checkpoints.values_of({"one": [variable]})["one.0"]
        write = tf.function(functools.partial(run, operation, variable.value), jit_compile=by_xla)
        write()
        write()
        np.testing.assert_array_equal(read, before)
        assert (np.array(variable) != read).any()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: testing.tiny_classifier(classes=4), r"does not fit the model.*\(8, 4\).*\(8, 3\)"),
        (
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
            "has 4 variables of the model.*has 2",
        ),
    ],
)
def test_values_of_another_model_raise_and_change_nothing(build, sentence):
    saved = checkpoints.values_of({"model": testing.tiny_classifier().variables})
    model = build()
    before = model.get_weights()
    with pytest.raises(ValueError, match=sentence):
        checkpoints.assign({"model": model.variables}, saved)
    for left, right in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(left, right)


def test_states_in_object_storage_are_those_of_a_local_directory(remote):
    directory = CheckpointDirectory(remote, keep=2)
    assert directory.latest() is None
    for step in (1, 2, 3):
        directory.save(state(0, step, weight=np.arange(3.0) + step))
    assert [path.name[-6:] for path in directory.paths()] == ["03.npz", "02.npz"]
    found = CheckpointDirectory(remote).latest()
    assert (found.position.step, found.arrays["weight"].tolist()) == (3, [3.0, 4.0, 5.0])


def test_a_damaged_state_in_object_storage_is_skipped(remote):
    directory = CheckpointDirectory(remote)
    directory.save(state(0, 1))
    path = directory.save(state(0, 2, weight=np.arange(1000.0)))
    with atomic_files.replacing(path) as temporary:
        temporary.write_bytes(path.read_bytes()[:500])
    with pytest.warns(UserWarning, match="://.*state-000000-000000002.npz is damaged"):
        assert directory.latest().position.step == 1


def test_a_file_in_object_storage_is_no_directory(remote):
    with atomic_files.replacing(f"{remote}/file") as temporary:
        temporary.touch()
    with pytest.raises(ValueError, match="A directory is needed, and this is a file: .*://.*file"):
        CheckpointDirectory(f"{remote}/file")
