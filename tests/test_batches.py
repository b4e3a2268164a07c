"""Batches of arrays without tf.data: the rules of the pipelines, on both backends."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import testing
from kdpkit.batches import ArrayBatches
from kdpkit.testing import generators, laws


def epoch_of(dataset):
    """Take an epoch as Keras does."""
    dataset.on_epoch_begin()
    given = [dataset[index] for index in range(len(dataset))]
    dataset.on_epoch_end()
    return given


# What comes out.


@settings(max_examples=40)
@given(
    examples=generators.example_counts(min_value=1),
    size=generators.example_counts(min_value=1, max_value=8),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    seed=st.sampled_from([None, 0, 7]),
)
def test_every_example_comes_once_an_epoch_but_for_what_is_dropped(examples, size, remainder, seed):
    data = np.arange(examples), {"label": -np.arange(examples)}
    if remainder == "drop" and examples < size:
        with pytest.raises(ValueError, match="fewer examples than a batch"):
            ArrayBatches(data, global_batch_size=size, remainder=remainder)
        return
    dataset = ArrayBatches(
        data, global_batch_size=size, remainder=remainder, seed=seed, mode="eval"
    )
    dropped = examples % size if remainder == "drop" else 0
    assert dataset.examples == examples - dropped
    for _ in range(2):
        epoch = epoch_of(dataset)
        laws.every_example_once(iter(epoch), examples=data, may_drop=dropped)
        assert remainder == "keep" or {len(x) for x, *_ in epoch} == {size}
        if seed is None:
            numbers = np.concatenate([x for x, *_ in epoch])[: dataset.examples]
            assert numbers.tolist() == [*range(dataset.examples)]


@settings(max_examples=40)
@given(shards=generators.shards(min_examples=1), remainder=st.sampled_from(["drop", "pad"]))
def test_the_shards_of_the_processes_are_the_batch_of_one(shards, remainder):
    examples, size, processes = shards
    if remainder == "drop" and examples < size:
        return
    data = np.arange(examples), np.arange(examples) % 5

    def read(processes):
        settings_ = {"global_batch_size": size, "remainder": remainder, "seed": 3}
        return [
            ArrayBatches(data, process_count=processes, process_index=index, **settings_)
            for index in range(processes)
        ]

    laws.same_examples_for_any_replicas(read, replicas=processes)
    laws.equal_steps(read(processes))


def test_every_epoch_has_its_order_and_augmentation_which_any_epoch_restores():
    def noisy(batch, generator):
        return np.stack([batch, generator.random(len(batch))])

    def build(**settings):
        settings = {"global_batch_size": 4, "seed": 5, "augment": noisy} | settings
        return ArrayBatches(np.arange(12), **settings)

    dataset = build()
    _ = dataset[0]  # a look at a batch is no epoch
    dataset.on_epoch_end()
    epochs = [np.concatenate(epoch_of(dataset), axis=1) for _ in range(3)]
    assert len(np.unique([drawn for _, drawn in epochs])) == 36
    assert len({tuple(order) for order, _ in epochs}) == 3
    assert all(sorted(order) == [*range(12)] for order, _ in epochs)
    later = build(steps_per_epoch=2)
    later.epoch = 2
    assert (len(later), later.examples) == (2, 8)
    np.testing.assert_array_equal(np.concatenate(epoch_of(later), axis=1), epochs[2][:, :8])
    assert (np.concatenate(epoch_of(build(seed=6)), axis=1) != epochs[0]).any()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 0}, "`global_batch_size`.*0"),
        ({"remainder": "wrap"}, "`remainder`.*'wrap'"),
        ({"steps_per_epoch": 4}, "which has 3. Received: steps_per_epoch=4"),
        ({"process_index": 1}, "`process_index` must be less than `process_count`"),
        ({"process_count": 2, "global_batch_size": 3}, "same number of examples.*process_count=2"),
        ({"process_count": 2, "remainder": "keep"}, "same number of examples.*examples=7"),
        ({"data": (np.arange(7), np.arange(6))}, r"same number of examples.*\(7,\), \(6,\)"),
        ({"data": 3.0}, "at least one"),
    ],
)
def test_settings_that_cannot_be_raise(arguments, sentence):
    arguments = {"data": np.arange(7), "global_batch_size": 2} | arguments
    with pytest.raises(ValueError, match=sentence):
        ArrayBatches(arguments.pop("data"), **arguments)


# With Keras.


def test_a_padded_evaluation_is_that_of_the_real_examples():
    x, y = testing.toy_classification(7)
    model = testing.tiny_classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    padded = ArrayBatches((x, y), global_batch_size=4, remainder="pad", mode="eval")
    ours = model.evaluate(padded, verbose=0, return_dict=True)
    plain = model.evaluate(x, y, verbose=0, return_dict=True)
    assert ours == pytest.approx(plain, rel=1e-5)
    predicted = model.predict(padded, verbose=0)[: padded.examples]
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), atol=1e-6)


# What a batch is made of.


@settings(max_examples=10)
@given(
    examples=st.integers(1, 9),
    filling=st.integers(0, 5),
    kind=st.sampled_from([None, "int32", "bool", "float32"]),
)
def test_padding_is_that_of_the_pipelines(examples, filling, kind):
    tf = pytest.importorskip("tensorflow")
    from kdpkit.pipelines import pad_to_global_batch

    x = {"a": np.arange(examples * 2.0).reshape(examples, 2), "b": np.arange(examples)}
    y, size = np.arange(examples), examples + filling
    batch = (x, y) if kind is None else (x, y, np.arange(1, examples + 1).astype(kind))
    ours = ArrayBatches(batch, global_batch_size=size, remainder="pad")[0]
    padded = tf.data.Dataset.from_tensors(batch).apply(pad_to_global_batch(size))
    (theirs,) = padded.as_numpy_iterator()
    for one, other in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
