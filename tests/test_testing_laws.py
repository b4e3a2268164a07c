"""Planted mistakes, each with a correct twin, that the docstrings of the laws do not have."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import find, given, settings
from keras import ops

from kdpkit import scaling
from kdpkit.testing import generators, laws
from kdpkit.training import replica_exact

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


def padded_loss(pad, batch):
    x, y, weights = batch
    indices = np.minimum(np.arange(6), len(x) - 1)
    laws.padding_keeps_the_loss(
        lambda x, y, weight: np.mean(weight * (x[:, 0] - y) ** 2),
        batch,
        (x[[*indices]], y[[*indices]], pad(weights)),
    )


def divided(split, drawn):
    batch = np.arange(drawn.global_batch_size)
    laws.split_as_tf_distribute(split(batch, drawn.replicas), of=batch)


def shuffled(seed_of, examples):
    def epochs(seed):
        return (
            np.random.default_rng([seed_of(seed), epoch]).permutation(examples)
            for epoch in itertools.count()
        )

    laws.reproducible(epochs, seed=3)


def accumulated(update, batch):
    laws.accumulation_equals_the_batch(update, batch[0], steps=2)


def computed(compute, split):
    x = np.random.default_rng(0).normal(size=(split.global_batch_size, 4))
    laws.same_numbers_for_any_replicas(
        lambda replicas: compute(parts_of(x, replicas)), replicas=split.replicas
    )


def from_tensorflow(pipeline, data):
    read = pipeline(data.source, len(data), data.global_batch_size)
    laws.every_example_once(read, examples=data.examples)


def parts_of(x, replicas):
    return np.split(x, np.cumsum(scaling.split_batch(len(x), replicas))[:-1])


def mean_of_all(parts):
    return np.sum([part.sum(0) for part in parts], 0) / sum(map(len, parts))


def rescaled(weights):
    return np.append(weights, [0.0] * (6 - len(weights))) * 6 / len(weights)


SHARDS, BATCHES = generators.shards(), generators.labelled_batches(max_size=4)
SPLITS = generators.splits(min_size=1, max_size=12)
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
    "a padded example counts in the mean": (
        *(padded_loss, generators.labelled_batches(max_size=6, weighted=True)),
        rescaled,
        lambda w: np.append(w, [0.0] * (6 - len(w))),
    ),
    "a batch is split as evenly as can be": (*(divided, SPLITS), parts_of, np.array_split),
    "the order does not follow from the seed": (
        *(shuffled, generators.example_counts(max_value=12)),
        lambda seed: seed,
        lambda _: time.perf_counter_ns(),
    ),
    "uneven micro-batches weigh the same": (
        *(accumulated, generators.labelled_batches(min_size=2)),
        mean_of_all,
        lambda parts: np.mean([part.mean(0) for part in parts], 0),
    ),
    "a replica without examples gives NaN": (
        *(computed, SPLITS),
        mean_of_all,
        lambda parts: sum(part.sum(0) / np.float64(len(part)) * len(part) for part in parts),
    ),
    "tf.data: repeat comes before batch": (
        *(from_tensorflow, generators.datasets(kinds=("int", "text", "ragged"))),
        lambda dataset, n, size: dataset.batch(size).repeat().take(-(-n // size)),
        lambda dataset, n, size: dataset.repeat().batch(size).take(-(-n // size)),
    ),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_with_few_examples_and_its_correct_twin_passes(name):
    law, strategy, right, wrong = CASES[name]
    settings(max_examples=10)(given(strategy)(lambda drawn: law(right, drawn)))()

    def is_broken(drawn):
        try:
            law(wrong, drawn)
        except AssertionError:
            return True
        return False

    found = find(strategy, is_broken)
    sizes = {
        tuple: lambda: len(found[0]),
        int: lambda: found,
        generators.Batches: lambda: len(found),
    }
    assert sizes.get(type(found), lambda: found[0])() <= MOST_EXAMPLES


class MeanOfMeans(keras.metrics.Metric):
    """Averages what batches have, however many examples they have."""

    def __init__(self, weighs):
        super().__init__(name="difference")
        self.weighs = weighs
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y, predictions, sample_weight=None):  # noqa: ARG002  # Keras' signature
        size = len(y) if self.weighs else 1
        self.total.assign_add(size * ops.mean(ops.abs(y - predictions)))
        self.count.assign_add(size)

    def result(self):
        return self.total / self.count


def mean_of_batch(y, predictions):
    return ops.mean(ops.square(y - predictions))


def mean_of_each(y, predictions):
    return ops.mean(ops.square(y - predictions), axis=-1)


def test_losses_and_metrics_that_look_at_the_batch_are_found():
    parts = np.array([[0.0], [1.0], [3.0]]), np.array([[0.0], [2.0], [6.0]])
    for right in (mean_of_each, MeanOfMeans(weighs=True)):
        laws.per_example(right, *parts)
    for wrong in (mean_of_batch, MeanOfMeans(weighs=False)):
        with pytest.raises(AssertionError):
            laws.per_example(wrong, *parts)


@pytest.mark.slow
def test_training_that_divides_a_loss_by_the_replicas_examples_is_found():
    def build(*, exact=False):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model = replica_exact(model) if exact else model
        model.compile(keras.optimizers.SGD(0.1), mean_of_batch)
        return model

    random = np.random.default_rng(0)
    data = random.normal(size=(3, 4)), random.normal(size=(3, 1))
    laws.same_training_for_any_replicas(lambda: build(exact=True), data, replicas=2)
    with pytest.raises(AssertionError):
        laws.same_training_for_any_replicas(build, data, replicas=2)


@pytest.mark.parametrize("rate", [np.nan, np.inf])
def test_a_schedule_that_is_no_number_between_its_ends_is_found(rate):
    def schedule(step):
        return np.where(step == 3, rate, 0.1)

    with pytest.raises(AssertionError, match="jumps at step 3"):
        laws.continuous_schedule(schedule, through={0: 0.1, 6: 0.1})


def test_tf_data_that_shuffles_before_its_cache_is_found():
    data = tf.data.Dataset.range(8)
    laws.reproducible(lambda seed: data.cache().shuffle(8, seed=seed))
    with pytest.raises(AssertionError, match="have the same order"):
        laws.reproducible(lambda seed: data.shuffle(8, seed=seed).cache())
