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


@pytest.mark.parametrize("name", NAMES)
@TRAINS
def test_replicas_and_a_run_that_was_stopped_train_as_stock_keras(name, directory, tmp_path):
    def run(*, stop_at=None):
        resume = Resume(tmp_path / "states")
        others = [StopAt(resume, stop_at)] if stop_at else []
        train = resume.track(made(name, directory))
        return batch_sources.by_fit(train, *others, resume, scope=scope_of(2))

    for stop_at in (2, 5):  # inside the first epoch, and the second
        with pytest.raises(SystemExit):
            run(stop_at=stop_at)
    expected = batch_sources.stock(batch_sources.expected(name, directory))
    assert_same(run(), expected, rtol=1e-5, atol=1e-5)


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
        (
            lambda: batches.Source(4, lambda i: (i, np.zeros(len(i) + 1))),
            r"same number of examples.*\(2,\), \(3,\)",
        ),
        (lambda: of_columns(y=[1, None]), "missing values.*'y', missing=1"),
        (lambda: of_columns(y=[[1.0], [None]]), "missing values.*'y', missing=1"),
        (lambda: of_columns(y=[["a"], [None]]), "missing values.*'y', missing=1"),
        (
            lambda: of_columns(y=[{"a": 1, "b": [1, 2]}] * 2),
            "no array of numbers.*part='y'.*flatten",
        ),
        (lambda: of_columns(y=[[], []]), "no array of numbers.*part='y'"),
        (
            lambda: batches.Source(2, lambda i: np.array(["a", None], object)[i]),
            "shape and the type|no array of numbers",
        ),
        (
            lambda: batches.from_datasets(datasets.DatasetDict(), x="a"),
            r'split, such as `data\["tr',
        ),
        (
            lambda: batches.from_datasets(datasets.Dataset.from_dict({"a": [1]}), x=[]),
            r"no such column.*column=\[\]",
        ),
        (lambda: of_columns(x=[[1.0], [2.0, 3.0]]), "no array of numbers.*part='x'"),
        (lambda: of_columns(x=[[1.0], [2.0], [3.0, 4.0], [5.0, 6.0]]), "shape and the type.*'x'"),
        (
            lambda: batches.from_datasets(datasets.Dataset.from_dict({"a": [1]}), x="b"),
            r"no such column.*'b', columns=\['a'\]",
        ),
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
            lambda: batches.from_grain(grain.MapDataset.range(4).batch(2)),
            r"single examples.*'BatchMapDataset'.*Leave `.batch\(\)`",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.range(4).to_iter_dataset().batch(2)),
            "single examples.*'BatchIterDataset'",
        ),
        (
            lambda: batches.from_grain(
                iter(grain.MapDataset.range(4).to_iter_dataset()), examples=4
            ),
            r"begin again.*`iter\(\)`",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.source([(1, None), (2, 3)])),
            "no array of numbers.*part='y'",
        ),
        (
            lambda: batches.from_grain(grain.MapDataset.range(4).repeat()),
            "how many examples.*Pass `examples`",
        ),
    ],
)
def test_data_that_cannot_be_batches_raise_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        epoch(make())


def test_what_is_filtered_out_is_not_missing():
    data = datasets.Dataset.from_dict({"x": [[1.0], [None], None, [2.0]]})
    kept = data.filter(lambda row: row["x"] not in ([None], None))
    assert epoch(batches.from_datasets(kept, x="x"))[0].tolist() == [[1.0], [2.0]]


def test_a_transform_makes_columns_of_others():
    def transform(rows):
        pixels = zip(rows["a"], rows["b"], strict=True)
        return {"pixels": [np.array([[a, b]]) for a, b in pixels], "label": rows["label"]}

    columns = {"a": [1, 2], "b": [3, 4], "label": [0, 1]}
    data = datasets.Dataset.from_dict(columns).with_transform(transform)
    x, y = epoch(batches.from_datasets(data, x="pixels", y="label"))[0]
    assert (x.tolist(), y.tolist()) == ([[[1, 3]], [[2, 4]]], [0, 1])
    with pytest.raises(ValueError, match=r"no such column.*columns=\['pixels', 'label'\]"):
        batches.from_datasets(data, x="a")


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


def test_a_parquet_file_that_is_cut_off_or_missing_is_named(directory, tmp_path):
    path = tmp_path / "cut.parquet"
    path.write_bytes((directory / "train.parquet").read_bytes()[:100])
    for named in (path, tmp_path / "none.parquet"):
        with pytest.raises(ValueError, match=f"Parquet file cannot be read: .*{named.name}"):
            batches.from_parquet(named, x="features")


def test_a_file_whose_name_is_a_pattern_is_read_alone(tmp_path):
    for index, name in enumerate(("a*b", "a and b", "a [1]")):
        path = str(tmp_path / f"{name}.parquet")
        datasets.Dataset.from_dict({"x": [index, index]}).to_parquet(path)
    for index, name in ((0, "a*b"), (2, "a [1]")):
        (batch,) = epoch(batches.from_parquet(tmp_path / f"{name}.parquet", x="x"))
        assert batch.tolist() == [index, index]


def test_a_damaged_image_is_named(tmp_path):
    folder = tmp_path / "cat"
    folder.mkdir()
    for name in "ab":
        keras.utils.save_img(folder / f"{name}.png", np.random.rand(30, 30, 3))
    whole = (folder / "b.png").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no image"):
        (folder / "b.png").write_bytes(damaged)
        with pytest.raises(ValueError, match="image cannot be read: .*b.png"):
            epoch(batches.from_images(tmp_path, size=(4, 4)))


def test_hidden_files_are_no_images_and_no_classes(tmp_path):
    for name in (
        ".git/a",
        "cat/a",
        "cat/._a",
        "cat/.ipynb_checkpoints/a",
        "cat/more/b",
        "dog/a",
        "dog/b",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(f"{tmp_path / name}.png", np.ones((4, 4, 3)))
    labels = [
        label for _, part in epoch(batches.from_images(tmp_path, size=(4, 4))) for label in part
    ]
    assert labels == [0, 0, 1, 1]


def test_images_of_other_kinds_are_converted_or_named(tmp_path):
    from PIL import Image

    (tmp_path / "a").mkdir()
    for mode in ("RGBA", "LA", "P", "1", "CMYK"):
        name = f"{mode}.jpg" if mode == "CMYK" else f"{mode}.png"
        Image.new(mode, (5, 3)).save(tmp_path / "a" / name)
    for color_mode, channels in (("rgb", 3), ("rgba", 4), ("grayscale", 1)):
        source = batches.from_images(tmp_path, size=(4, 6), color_mode=color_mode)
        assert {x.shape[1:] for x, _ in epoch(source)} == {(4, 6, channels)}
        assert max(x.max() for x, _ in epoch(source)) <= 255
    Image.fromarray(np.full((3, 5), 40_000, "uint16")).save(tmp_path / "a" / "deep.png")
    with pytest.raises(ValueError, match="more than 8 bits a value: .*deep.png"):
        epoch(batches.from_images(tmp_path, size=(4, 6)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 4}, "`size` must be .*size=4"),
        ({"size": (4, 4, 3)}, "`size` must be "),
        ({"size": (0, 4)}, "`size` must be a positive integer"),
        ({"size": (4, 4), "color_mode": "gray"}, "`color_mode` must be one of 'rgb'"),
    ],
)
def test_wrong_settings_of_images_are_named(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        batches.from_images(tmp_path, **settings)


def test_a_directory_without_images_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"no images in subdirectories.*{tmp_path.name}"):
        batches.from_images(tmp_path, size=(4, 4))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'Run `pip install .*\[data\]"`'):
        batches.from_parquet(tmp_path / "a.parquet", x="a")
