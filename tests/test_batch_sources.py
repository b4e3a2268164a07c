"""Grain, `datasets`, Parquet files and images: the batches of arrays in memory."""

import os
import sys

import keras
import numpy as np
import pytest

from kdpkit import batches, testing
from kdpkit.batches import ArrayBatches

datasets = pytest.importorskip("datasets")
grain = pytest.importorskip("grain")
pytest.importorskip("PIL")


ON_JAX = keras.backend.backend() == "jax"
EXAMPLES = 23
SHUFFLED_BY_GRAIN = ("grain MapDataset", "grain IterDataset", "grain DataLoader")
NAMES = ("datasets", "parquet", "images", *SHUFFLED_BY_GRAIN)


def write(directory):
    """Write what the sources read."""
    x, y = arrays("datasets", directory)
    table = {"features": x.tolist(), "label": y.tolist(), "weight": [1.0] * EXAMPLES}
    datasets.Dataset.from_dict(table).to_parquet(directory / "train.parquet", batch_size=7)
    for index, pixels in enumerate(np.random.default_rng(1).integers(0, 4, (EXAMPLES, 2, 2, 1))):
        folder = directory / "images" / "abc"[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(folder / f"{index:02}.png", pixels, scale=False)


def arrays(name, directory):
    """All examples of a source, in its order."""
    if name != "images":
        x, y = testing.toy_classification(EXAMPLES)
        return x.astype("float32"), y
    files = sorted((directory / "images").rglob("*.png"))
    x = [keras.utils.img_to_array(keras.utils.load_img(f, color_mode="grayscale")) for f in files]
    return np.stack(x), np.array(["abc".index(file.parent.name) for file in files])


def of_grain(name):
    """A dataset of Grain, which for a `MapDataset` has an order of its own in each epoch."""
    source = [*zip(*arrays(name, None), strict=True)]
    examples = grain.MapDataset.source(source)
    if name == "grain MapDataset":
        return examples.shuffle(seed=4)
    if name == "grain IterDataset":  # which ends
        return examples.shuffle(seed=4).to_iter_dataset().filter(lambda _: True)
    return grain.DataLoader(  # which does not
        data_source=source,
        sampler=grain.samplers.IndexSampler(EXAMPLES, shuffle=True, seed=4),
        shard_options=grain.sharding.NoSharding(),
    )


def made(name, directory):
    """Batches of a source, of which the last of an epoch is smaller."""
    columns = {"x": "features", "y": "label"}
    if name in SHUFFLED_BY_GRAIN:
        examples = None if name == "grain MapDataset" else EXAMPLES
        source = batches.from_grain(of_grain(name), examples=examples)
    elif name == "datasets":
        x, y = arrays(name, directory)
        data = datasets.Dataset.from_dict({"features": x.tolist(), "label": y.tolist()})
        source = batches.from_datasets(data, **columns)
    elif name == "parquet":
        source = batches.from_parquet(directory / "train.parquet", **columns)
    else:
        source = batches.from_images(directory / "images", size=(2, 2), color_mode="grayscale")
    seed = {} if name in SHUFFLED_BY_GRAIN else {"seed": 1}
    return ArrayBatches(source, global_batch_size=5, remainder="keep", **seed)


def expected(name, directory, epochs=3):
    """The same batches, of arrays in memory and of what Grain itself iterates."""
    if name not in SHUFFLED_BY_GRAIN:
        dataset = ArrayBatches(
            arrays(name, directory), global_batch_size=5, seed=1, remainder="keep"
        )
        for dataset.epoch in range(epochs):
            yield from (dataset[index] for index in range(len(dataset)))
        return
    dataset = of_grain(name)
    if name == "grain MapDataset":
        taken = [*dataset.repeat(epochs)]
    elif name == "grain IterDataset":
        taken = [*dataset] * epochs
    else:
        taken = [example for example, _ in zip(dataset, range(epochs * EXAMPLES), strict=False)]
    for epoch in range(epochs):
        of_epoch = taken[epoch * EXAMPLES : (epoch + 1) * EXAMPLES]
        for first in range(0, EXAMPLES, 5):
            x, y = zip(*of_epoch[first : first + 5], strict=True)
            yield np.stack(x), np.array(y)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sources")
    os.environ["HF_DATASETS_CACHE"] = datasets.config.HF_DATASETS_CACHE = str(directory / "cache")
    datasets.disable_progress_bars()
    write(directory)
    return directory


def assert_same(ours, theirs, **tolerance):
    for one, other in zip(*map(keras.tree.flatten, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


# What comes out.


@pytest.mark.parametrize("name", NAMES)
def test_the_batches_are_those_of_arrays_in_any_order_of_reading(name, directory):
    theirs = [*expected(name, directory)]
    ours, steps = made(name, directory), len(theirs) // 3
    assert len(ours) == steps == 5
    # A run that is resumed, an epoch, validation between two, and back.
    for position in (7, *range(len(theirs)), 3):
        ours.epoch, index = divmod(position, steps)
        assert_same(ours[index], theirs[position], rtol=0)
    if name != "grain IterDataset":
        orders = {str(np.concatenate([x for x, _ in theirs[e * steps :][:steps]])) for e in (0, 1)}
        assert len(orders) == 2


def test_a_stream_continues_behind_an_epoch_or_begins_again():
    endless = grain.MapDataset.range(5).repeat().to_iter_dataset()
    train = ArrayBatches(batches.from_grain(endless, examples=3), global_batch_size=3)
    for train.epoch in (0, 1, 7):
        assert train[0].tolist() == [
            index % 5 for index in range(3 * train.epoch, 3 * train.epoch + 3)
        ]


# Bad input.


def of_columns(**columns):
    data = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], **columns})
    return batches.from_datasets(data, x="x", y="y" if "y" in columns else None)


def epoch(source):
    dataset = ArrayBatches(source, global_batch_size=2, remainder="keep")
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
        (lambda: batches.Source(4, lambda _: np.zeros(3)), "indices=2, examples=3"),
        (lambda: [[1, 2], [3]], r"one shape.*first=\[1, 2\]"),
        (lambda: of_columns(y=[1, None]), "missing values.*'y', missing=1"),
        (
            lambda: of_columns(y=[{"a": 1, "b": [1, 2]}] * 2),
            "no array of numbers.*part='y'.*flatten",
        ),
        (
            lambda: batches.from_datasets(datasets.DatasetDict(), x="a"),
            r'split, such as `data\["tr',
        ),
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
            lambda: batches.from_grain(
                iter(grain.MapDataset.range(4).to_iter_dataset()), examples=4
            ),
            r"begin again.*`iter\(\)`",
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
    for name in (".git/a", "cat/a", "cat/._a", "cat/.ipynb_checkpoints/a", "cat/more/b", "dog/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(f"{tmp_path / name}.png", np.ones((4, 4, 3)))
    labels = [
        label for _, part in epoch(batches.from_images(tmp_path, size=(4, 4))) for label in part
    ]
    assert labels == [0, 0, 1]


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


def test_a_directory_without_images_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"no images in subdirectories.*{tmp_path.name}"):
        batches.from_images(tmp_path, size=(4, 4))
    with pytest.raises(ValueError, match="`size` must be .*size=4"):
        batches.from_images(tmp_path, size=4)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'Run `pip install .*\[data\]"`'):
        batches.from_parquet(tmp_path / "a.parquet", x="a")
