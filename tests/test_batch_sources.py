"""Grain and `datasets`: the batches of arrays in memory."""

import keras
import numpy as np
import pytest

from kdpkit import batches, testing
from kdpkit.batches import ArrayBatches

datasets = pytest.importorskip("datasets")
grain = pytest.importorskip("grain")


ON_JAX = keras.backend.backend() == "jax"
EXAMPLES = 23
SHUFFLED_BY_GRAIN = ("grain MapDataset", "grain IterDataset", "grain DataLoader")
NAMES = ("datasets", *SHUFFLED_BY_GRAIN)


def arrays():
    """All examples of a source, in its order."""
    x, y = testing.toy_classification(EXAMPLES)
    return x.astype("float32"), y


def of_grain(name):
    """A dataset of Grain, which for a `MapDataset` has an order of its own in each epoch."""
    source = [*zip(*arrays(), strict=True)]
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


def made(name, size=5, **settings):
    """Batches of a source, of which the last of an epoch is smaller."""
    settings = {"remainder": "keep"} | settings
    if name in SHUFFLED_BY_GRAIN:
        examples = None if name == "grain MapDataset" else EXAMPLES
        source = batches.from_grain(of_grain(name), examples=examples)
    else:
        x, y = arrays()
        data = datasets.Dataset.from_dict({"features": x.tolist(), "label": y.tolist()})
        source = batches.from_datasets(data, x="features", y="label")
        settings = {"seed": 1} | settings
    return ArrayBatches(source, global_batch_size=size, **settings)


def expected(name, size=5, epochs=3):
    """The same batches, of arrays in memory and of what Grain itself iterates."""
    if name not in SHUFFLED_BY_GRAIN:
        dataset = ArrayBatches(arrays(), global_batch_size=size, seed=1, remainder="keep")
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


def assert_same(ours, theirs, **tolerance):
    for one, other in zip(*map(keras.tree.flatten, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


# What comes out.


@pytest.mark.parametrize("name", NAMES)
def test_the_batches_are_those_of_arrays_in_any_order_of_reading(name):
    theirs = [*expected(name)]
    ours, steps = made(name), len(theirs) // 3
    assert len(ours) == steps == 5
    # A run that is resumed, an epoch, validation between two, and back.
    for position in (7, *range(len(theirs)), 3):
        ours.epoch, index = divmod(position, steps)
        assert_same(ours[index], theirs[position], rtol=0)
    if name != "grain IterDataset":
        orders = {str(np.concatenate([x for x, _ in theirs[e * steps :][:steps]])) for e in (0, 1)}
        assert len(orders) == 2


@pytest.mark.parametrize("name", NAMES)
def test_processes_read_their_parts_of_padded_batches(name):
    settings = {"size": 6, "remainder": "pad"}
    alone = made(name, **settings)
    parts = [made(name, process_count=3, process_index=i, **settings) for i in range(3)]
    for index in range(len(alone)):
        shards = [part[index] for part in parts]
        joined = [np.concatenate(same) for same in zip(*shards, strict=True)]
        assert_same(joined, alone[index], rtol=0)


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


from_grain, NUMBERS, RANDOM = (
    batches.from_grain,
    grain.MapDataset.range(4),
    np.random.default_rng(0),
)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: batches.Source(4, lambda i: (i, np.zeros(len(i) + 1))), r"\(2,\), \(3,\)"),
        (lambda: batches.Source(4, lambda _: np.zeros(3)), "indices=2, examples=3"),
        (lambda: [[1, 2], [3]], r"one shape.*first=\[1, 2\]"),
        (lambda: of_columns(y=[1, None]), "missing values.*'y', missing=1"),
        (lambda: of_columns(y=[{"a": 1, "b": [1, 2]}] * 2), "no array of n.*part='y'.*flatten"),
        (lambda: batches.from_datasets(datasets.DatasetDict(), x="a"), r'split.*`data\["tr'),
        (lambda: of_columns(x=[[1.0], [2.0], [3.0, 4.0], [5.0, 6.0]]), "shape and the type.*'x'"),
        (lambda: batches.from_datasets(datasets.Dataset.from_dict({"a": [1]}), x="b"), r"\['a'\]"),
        (lambda: datasets.Dataset.from_dict({"a": [1, 2]}), "no arrays.*from_datasets"),
        (lambda: NUMBERS, "no arrays.*'RangeMapDataset'.*from_grain"),
        (lambda: from_grain(NUMBERS.map(lambda x: x + RANDOM.random())), "another one.*`augment`"),
        (lambda: from_grain(NUMBERS.filter(lambda x: x != 1)), "filtered.*to_iter_dataset"),
        (lambda: from_grain(grain.MapDataset.source([[1], [1, 2]]).map(np.array)), "Pad or cut"),
        (lambda: from_grain(NUMBERS.batch(2)), r"single.*'BatchMapDataset'.*Leave `.batch\(\)`"),
        (lambda: from_grain(iter(NUMBERS.to_iter_dataset()), examples=4), r"begin.*`iter\(\)`"),
        (lambda: from_grain(NUMBERS.repeat()), "how many examples.*Pass `examples`"),
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
