"""Grain, `datasets`, Parquet files and images: the batches of arrays in memory, and their training.

The sources are in batch_sources.py.
"""

import os
import sys

import keras
import numpy as np
import pytest

from kdpkit import batches
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import Resume
from tests import batch_sources
from tests.batch_sources import NAMES, ON_JAX, made

datasets = pytest.importorskip("datasets")
grain = pytest.importorskip("grain")
pytest.importorskip("PIL")

# On JAX too, where tests/test_environments.py runs of the slow tests only those that are marked.
TRAINS = pytest.mark.jax if ON_JAX else pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sources")
    os.environ["HF_DATASETS_CACHE"] = datasets.config.HF_DATASETS_CACHE = str(directory / "cache")
    datasets.disable_progress_bars()
    batch_sources.write(directory)
    return directory


def assert_same(ours, theirs, **tolerance):
    for one, other in zip(*map(keras.tree.flatten, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


# What comes out.


@pytest.mark.parametrize("name", NAMES)
def test_the_batches_are_those_of_arrays_in_any_order_of_reading(name, directory):
    theirs = [*batch_sources.expected(name, directory, epochs=3)]
    ours, steps = made(name, directory), len(theirs) // 3
    assert len(ours) == steps == 5
    # A run that is resumed, an epoch, validation between two, and back.
    for position in (7, *range(len(theirs)), 3):
        ours.epoch, index = divmod(position, steps)
        assert_same(ours[index], theirs[position], rtol=0)
    if name != "grain IterDataset":
        orders = {str(np.concatenate([x for x, _ in theirs[e * steps :][:steps]])) for e in (0, 1)}
        assert len(orders) == 2


@pytest.mark.parametrize("name", NAMES)
def test_processes_read_their_parts_of_padded_batches(name, directory):
    settings = {"size": 6, "remainder": "pad"}
    alone = made(name, directory, **settings)
    parts = [made(name, directory, process_count=3, process_index=i, **settings) for i in range(3)]
    for index in range(len(alone)):
        shards = [part[index] for part in parts]
        joined = [np.concatenate(same) for same in zip(*shards, strict=True)]
        assert_same(joined, alone[index], rtol=0)


def test_a_process_reads_no_examples_of_others():
    read = []
    source = batches.Source(8, lambda indices: read.append(indices.tolist()) or indices)
    dataset = ArrayBatches(source, global_batch_size=4, process_count=2, process_index=1)
    del read[:]
    assert dataset[1].tolist() == [6, 7]
    assert read == [[6, 7]]


def test_columns_become_a_dictionary_and_weights(directory):
    path = directory / "train.parquet"
    source = batches.from_parquet(path, x=["features", "weight"], y="label", sample_weight="weight")
    x, y, weight = ArrayBatches(source, global_batch_size=4)[0]
    assert {name: part.shape for name, part in x.items()} == {"features": (4, 4), "weight": (4,)}
    assert (y.shape, weight.tolist()) == ((4,), [1.0] * 4)


def test_a_stream_continues_behind_an_epoch_or_begins_again():
    endless = grain.MapDataset.range(5).repeat().to_iter_dataset()
    train = ArrayBatches(batches.from_grain(endless, examples=3), global_batch_size=3)
    for train.epoch in (0, 1, 7):
        assert train[0].tolist() == [
            index % 5 for index in range(3 * train.epoch, 3 * train.epoch + 3)
        ]


# With Keras.


def scope_of(replicas):
    if ON_JAX:
        from kdpkit import sharding

        return sharding.DataParallel(replicas)
    from kdpkit import strategies

    return strategies.select_strategy("mirrored", devices=replicas)


class StopAt(keras.callbacks.Callback):
    """Stops a run after some steps."""

    def __init__(self, resume, steps):
        super().__init__()
        self.resume, self.steps = resume, steps

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 Keras' hook
        self.steps -= 1
        if self.steps == 0:
            self.resume.request_stop()


@pytest.mark.parametrize(
    ("name", "train"),
    [*zip(NAMES, 3 * (batch_sources.by_fit, batch_sources.by_loop), strict=True)],
)
@TRAINS
def test_a_run_stopped_inside_an_epoch_trains_what_stock_keras_trains_on_one_device(
    name, train, directory, tmp_path
):
    def run(*, stop_at=None):
        resume = Resume(tmp_path / "states")
        others = [StopAt(resume, stop_at)] if stop_at else []
        return train(resume.track(made(name, directory)), *others, resume, scope=scope_of(2))

    for stop_at in (2, 5):  # inside the first epoch, and the second
        with pytest.raises(SystemExit):
            run(stop_at=stop_at)
    alone = batch_sources.stock(batch_sources.expected(name, directory))
    assert_same(run(), alone, rtol=1e-5, atol=1e-5)


# Bad input.


def of_columns(**columns):
    data = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], **columns})
    return batches.from_datasets(data, x="x", y="y" if "y" in columns else None)


def epoch(source):
    dataset = ArrayBatches(source, global_batch_size=2)
    return [dataset[index] for index in range(len(dataset))]


def with_random_numbers():
    generator = np.random.default_rng(0)
    return grain.MapDataset.range(4).map(lambda x: x + generator.random())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: (np.zeros(3), np.zeros(4)), r"same number of examples.*\(3,\), \(4,\)"),
        (
            lambda: batches.Source(4, lambda i: (i, np.zeros(len(i) + 1))),
            r"same number of examples.*\(2,\), \(3,\)",
        ),
        (lambda: of_columns(y=[1, None]), "missing values.*'y', missing=1"),
        (lambda: of_columns(x=[[1.0], [2.0, 3.0]]), "no array of numbers.*part='x'"),
        (lambda: of_columns(x=[[1.0], [2.0], [3.0, 4.0], [5.0, 6.0]]), "shape and the type.*'x'"),
        (lambda: of_columns(x=[]), "`examples` must be a positive integer.*0"),
        (
            lambda: batches.from_datasets(datasets.Dataset.from_dict({"a": [1]}), x="b"),
            r"no such column.*'b', columns=\['a'\]",
        ),
        (lambda: batches.from_datasets({"train": []}, x="a"), "`datasets.Dataset`.*'dict'"),
        (lambda: datasets.Dataset.from_dict({"a": [1, 2]}), "no arrays.*from_datasets"),
        (lambda: grain.MapDataset.range(4), "no arrays.*'RangeMapDataset'.*from_grain"),
        (lambda: batches.from_grain(with_random_numbers()), "another one each time.*`augment`"),
        (
            lambda: batches.from_grain(grain.MapDataset.range(4).filter(lambda x: x != 1)),
            "filtered.*to_iter_dataset",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.source([[1], [1, 2]]).map(np.array)),
            "same parts, of the same shape.*Pad or cut",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.range(4).repeat()),
            "how many examples.*Pass `examples`",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.range(4).to_iter_dataset()),
            "how many examples.*IterDataset'",
        ),
        (
            lambda: batches.from_grain(
                grain.MapDataset.range(4).filter(lambda _: False).to_iter_dataset(), examples=4
            ),
            "no example",
        ),
    ],
)
def test_data_that_cannot_be_batches_raise_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        epoch(make())


def test_an_order_of_grain_takes_no_seed():
    source = batches.from_grain(grain.MapDataset.range(4))
    with pytest.raises(ValueError, match="order of their own.*seed=3"):
        ArrayBatches(source, global_batch_size=2, seed=3)


def test_text_is_for_tensorflow():
    source = of_columns(y=["a", "b"])
    if ON_JAX:
        with pytest.raises(ValueError, match=r"no array of numbers.*part='y', example=\['a'\]"):
            epoch(source)
    else:
        assert epoch(source)[0][1].numpy().tolist() == [b"a", b"b"]


@pytest.mark.parametrize("keep", [0, 100, -30])
def test_a_parquet_file_that_is_cut_off_or_missing_is_named(keep, directory, tmp_path):
    path = tmp_path / "cut.parquet"
    path.write_bytes((directory / "train.parquet").read_bytes()[:keep])
    for named in (path, tmp_path / "none.parquet"):
        with pytest.raises(ValueError, match=f"Parquet file is missing, cut off or.*{named.name}"):
            batches.from_parquet(named, x="features")


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_damaged_image_is_named(suffix, tmp_path):
    folder = tmp_path / "cat"
    folder.mkdir()
    for name in "ab":
        keras.utils.save_img(folder / f"{name}{suffix}", np.random.rand(30, 30, 3))
    whole = (folder / f"b{suffix}").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no image"):
        (folder / f"b{suffix}").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"image is missing, cut off or damaged: .*b{suffix}"):
            epoch(batches.from_images(tmp_path, size=(4, 4)))


def test_a_directory_without_images_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"no images in subdirectories.*{tmp_path.name}"):
        batches.from_images(tmp_path, size=(4, 4))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'Run `pip install .*\[data\]"`'):
        batches.from_parquet(tmp_path / "a.parquet", x="a")
