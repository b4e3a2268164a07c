"""Planted mistakes, each with a correct twin, that the docstrings of the laws do not have."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import find, given, settings

from kdpkit.testing import generators, laws

pytestmark = pytest.mark.tensorflow

MOST_EXAMPLES = 5  # of a counterexample


def sharded(shard, shards):
    read = [iter(shard(*shards, index)) for index in range(shards.processes)]
    laws.every_example_once(read, examples=shards.examples)


def equal(shard, shards):
    laws.equal_steps([iter(shard(*shards, index)) for index in range(shards.processes)])


def labelled(order, batch):
    x, y = batch
    laws.every_example_once(iter([(x[order(len(x))], y)]), examples=batch)


def padded(weights, batch):
    num_examples = len(batch[0])
    positions = np.arange(-(-num_examples // 4) * 4)  # of a multiple of four
    of_examples = (positions < num_examples).astype("float32")
    parts = [part[np.minimum(positions, num_examples - 1)] for part in batch]
    laws.every_example_once(iter([(*parts, *weights(of_examples))]), examples=batch)


def shuffled(seed_of, examples):
    def epochs(seed):
        return (
            np.random.default_rng([seed_of(seed), epoch]).permutation(examples)
            for epoch in itertools.count()
        )

    laws.reproducible(epochs, seed=3)


def scaled(largest, batch):
    (train, _), (held_out, _) = batch, (batch[0][::2] + 1, None)
    laws.held_out_does_not_leak(lambda changed: iter(train / largest(train, changed)), held_out)


def from_tensorflow(pipeline, data):
    read = pipeline(data.source, len(data), data.global_batch_size)
    laws.every_example_once(read, examples=data.examples)


SHARDS, BATCHES = generators.shards(), generators.labelled_batches(max_size=4)
CASES = {
    "the tail is lost": (
        *(sharded, SHARDS),
        lambda n, _, p, i: range(i, n, p),
        lambda n, _, p, i: range(n)[i * (n // p) :][: n // p],
    ),
    "the last batch is of one process only": (
        *(equal, SHARDS),
        lambda n, _, p, i: range(n)[: n // p * p][i::p],
        lambda n, b, p, i: range(i * b, n, b * p),
    ),
    "examples are shuffled, and labels are not": (
        *(labelled, BATCHES),
        np.arange,
        lambda n: np.arange(n)[::-1],
    ),
    "padding has no weight of zero": (
        *(padded, BATCHES),
        lambda weights: [np.array(weights) > 0],
        lambda _: [],
    ),
    "the order does not follow from the seed": (
        *(shuffled, generators.example_counts(max_value=12)),
        lambda seed: seed,
        lambda _: time.perf_counter_ns(),
    ),
    "test examples are in the statistics": (
        *(scaled, generators.labelled_batches(min_size=3)),
        lambda train, _: np.abs(train).max(),
        lambda train, held_out: np.abs([*train, *held_out]).max(),
    ),
    "tf.data: repeat comes before batch": (
        *(from_tensorflow, generators.datasets(kinds=("int", "text", "ragged"))),
        lambda dataset, n, size: dataset.batch(size).repeat().take(-(-n // size)),
        lambda dataset, n, size: dataset.repeat().batch(size).take(-(-n // size)),
    ),
}


def is_broken(test):
    try:
        test()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_with_few_examples_and_its_correct_twin_passes(name):
    law, strategy, right, wrong = CASES[name]
    settings(max_examples=10)(given(strategy)(lambda drawn: law(right, drawn)))()

    found = find(strategy, lambda drawn: is_broken(lambda: law(wrong, drawn)))
    sizes = {
        tuple: lambda: len(found[0]),
        int: lambda: found,
        generators.Batches: lambda: len(found),
    }
    assert sizes.get(type(found), lambda: found[0])() <= MOST_EXAMPLES


def test_a_loss_on_the_last_shard_is_shown_with_two_processes():
    """Every process has the mistake, and only with several is the shard seen."""

    def read(examples, _, processes, index):
        return iter(range(index, examples - (index == processes - 1), processes))

    found = find(generators.shards(), lambda drawn: is_broken(lambda: sharded(read, drawn)))
    assert found.processes == 2
    with pytest.raises(AssertionError, match=r"example 5 is lost.*\(shard 1 has the fewest, 2\)"):
        sharded(read, generators.Shards(examples=6, global_batch_size=2, processes=2))


@pytest.mark.parametrize(
    "held_out", [np.array(["a", "b"]), {"n": np.arange(2)}, (np.eye(2), np.ones(2))]
)
def test_held_out_examples_of_any_kind_are_changed(held_out):
    laws.held_out_does_not_leak(lambda _: range(3), held_out)
    with pytest.raises(AssertionError, match="With other held-out examples"):
        laws.held_out_does_not_leak(lambda changed: iter([repr(changed)]), held_out)


def test_several_lost_examples_are_named_in_words():
    with pytest.raises(AssertionError, match="examples 0 and 1 are lost and example 2 is read"):
        laws.every_example_once(iter([2, 2]), examples=3)


def test_tf_data_that_shuffles_before_its_cache_is_found():
    data = tf.data.Dataset.range(8)
    laws.reproducible(lambda seed: data.cache().shuffle(8, seed=seed))
    with pytest.raises(AssertionError, match="have the same order"):
        laws.reproducible(lambda seed: data.shuffle(8, seed=seed).cache())
