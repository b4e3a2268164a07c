"""Planted mistakes, each with a correct twin: a law finds the one, and lets the other pass."""

import functools
import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from kdpkit import batches, scaling
from kdpkit.testing import generators, laws
from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow

MOST_EXAMPLES = 5  # of a counterexample

# How many examples each call of a law had; the last one is the counterexample.
drawn = []


def law(strategy, examples=len):
    """Make of a check what Hypothesis tries of a part; `examples` counts those of what is drawn."""

    def made(check):
        def of(part):
            @given(strategy)
            def tried(found):
                drawn.append(examples(found))
                check(part, found)

            return tried

        of.__name__ = check.__name__
        return of

    return made


def of_shards(shards):
    return shards.examples


def of_batch(batch):
    return len(batch[0])


SHARDS = generators.shards()
BATCHES = generators.labelled_batches(max_size=4)


@law(SHARDS, of_shards)
def once(shard, shards):
    examples, processes = shards.examples, shards.processes
    read = [shard(examples, processes, index) for index in range(processes)]
    laws.every_example_once(read, examples=examples)


@law(generators.nested_examples(min_size=1), batches.num_examples)
def once_in_batches(read, examples):
    count = batches.num_examples(examples)
    laws.every_example_once(iter(read(examples, count)), examples=examples)


@law(BATCHES, of_batch)
def padded(pad, batch):
    laws.every_example_once(iter([pad(*batch)]), examples=batch)


@law(SHARDS, of_shards)
def equal(shard, shards):
    laws.equal_steps([shard(*shards, index) for index in range(shards.processes)])


@law(SHARDS, of_shards)
def ordered(read, shards):
    examples, size, replicas = shards
    laws.same_examples_for_any_replicas(
        lambda count: read(examples, size, count), replicas=replicas
    )


@law(generators.splits(), lambda split: split.global_batch_size)
def divided(split, drawn_split):
    batch = np.arange(drawn_split.global_batch_size)
    laws.split_as_tf_distribute(split(batch, drawn_split.replicas), of=batch)


@law(generators.labelled_batches(max_size=6, weighted=True), of_batch)
def padded_loss(pad, batch):
    x, y, weights = batch
    indices = np.minimum(np.arange(6), len(x) - 1)
    laws.padding_keeps_the_loss(
        lambda x, y, weight: np.mean(weight * (x[:, 0] - y) ** 2),
        batch,
        (x[[*indices]], y[[*indices]], pad(weights)),
    )


@law(generators.example_counts(max_value=12), int)
def shuffled(orders, examples):
    laws.reproducible(lambda seed: orders(examples, seed), seed=3)


@law(st.tuples(st.integers(1, 8), st.integers(1, 8)))
def scheduled(rate, lengths):
    warmup, total = lengths[0], sum(lengths)
    ends = {0: 0.0, warmup: 1.0, total: 0.0}
    laws.continuous_schedule(lambda step: rate(step, warmup, total), through=ends)


@law(generators.labelled_batches(min_size=2), of_batch)
def accumulated(update, batch):
    laws.accumulation_equals_the_batch(update, batch[0], steps=2)


@law(generators.splits(min_size=1, max_size=12), lambda split: split.global_batch_size)
def computed(compute, split):
    x, _ = scaled_data(split.global_batch_size)
    laws.same_numbers_for_any_replicas(
        lambda replicas: compute(parts_of(x, replicas)), replicas=split.replicas
    )


@law(generators.example_counts(min_value=3), int)
def resumed(resume, examples):
    laws.resumed_run_continues(lambda steps: resume(examples, steps), after=1)


@law(generators.datasets(kinds=("int", "text", "ragged")))
def tensorflow_once(pipeline, data):
    read = pipeline(data.source, len(data), data.global_batch_size)
    laws.every_example_once(read, examples=data.examples)


@law(generators.example_counts(max_value=8), int)
def tensorflow_epochs(pipeline, examples):
    dataset = tf.data.Dataset.range(examples)
    laws.reproducible(lambda seed: pipeline(dataset, max(examples, 1), seed))


@law(generators.labelled_batches(min_size=2, max_size=5), of_batch)
def by_itself(part, batch):
    x, made = batch[0], part()
    laws.per_example(made, *((x,) if isinstance(made, keras.Layer) else (x, 2 * x)))


@law(st.sampled_from([3, 5]), int)  # each trains three to five models, which takes seconds
def trained(build, examples):
    laws.same_training_for_any_replicas(build, scaled_data(examples), replicas=2)


def scaled_data(examples):
    random = np.random.default_rng(0)
    return random.normal(size=(examples, 4)), random.normal(size=(examples, 1))


def in_batches(indices, size):
    """Cut indices into batches."""
    return iter([indices[start : start + size] for start in range(0, len(indices), size)])


def rows(examples, indices):
    return keras.tree.map_structure(lambda part: part[indices], examples)


def permuted(examples, *seed):
    return np.random.default_rng(seed).permutation(examples)


def strided(examples, processes, index):
    return iter(range(index, examples, processes))


def contiguous(examples, processes, index):
    size = -(-examples // processes)
    return iter(range(examples)[index * size :][:size])


def of_all_batches(examples, count):
    return [rows(examples, part) for part in in_batches(np.arange(count), 2)]


def with_labels_in_order(examples, count):
    if isinstance(examples, tuple):
        x, *labels = examples
        examples = (rows(x, np.arange(count)[::-1]), *labels)
    return of_all_batches(examples, count)


def padding(x, y, weights):
    indices = [*range(len(x)), *[len(x) - 1] * (4 - len(x))]
    return (x[indices], y[indices], np.asarray(weights)) if weights else (x[indices], y[indices])


def dealt_whole_batches(examples, size, processes, index):
    starts = range(index * size, examples, size * processes)
    return iter([range(examples)[start : start + size] for start in starts])


def process_batches(examples, size, processes, index, remainder):
    if examples == 0:
        return iter(())
    size_of_each, left = divmod(examples, processes)
    left = left if remainder == "balance" else 0
    start = index * size_of_each + min(index, left)
    of_process = range(start, start + size_of_each + (index < left))
    return in_batches(of_process, size // processes)


def parts_of_batches(examples, size, replicas, *, seed=0, drop=False):
    order, per_replica = permuted(examples, seed), size // replicas
    shards = []
    for index in range(replicas):
        own = [batch[index * per_replica :][:per_replica] for batch in in_batches(order, size)]
        shards.append(iter([part for part in own if not drop or len(part) == per_replica]))
    return shards


def epoch_orders(examples, *seed):
    return (permuted(examples, *seed, epoch) for epoch in itertools.count())


def mean_gradient(parts):
    return np.sum([part.sum(0) for part in parts], 0) / sum(map(len, parts))


class PerBatch(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


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


def compiled(*, exact):
    def build():
        start = keras.initializers.GlorotUniform(seed=1)
        layers = [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=start)]
        model = keras.Sequential(layers)
        model = replica_exact(model) if exact else model
        model.compile(keras.optimizers.SGD(0.1), mean_over_own)
        return model

    return build


def mean_over_own(y, predictions):
    return ops.mean(ops.square(y - predictions))


def mean_of_each(y, predictions):
    return ops.mean(ops.square(y - predictions), axis=-1)


def parts_of(x, replicas):
    return np.split(x, np.cumsum(scaling.split_batch(len(x), replicas))[:-1])


def decaying(s, w, t):
    return s / w if s < w else 1 - (s - w) / (t - w)


def rescaled(weights):
    return np.append(weights, [0.0] * (6 - len(weights))) * 6 / len(weights)


# Of each law what keeps it, and mistakes.
MISTAKES = {
    once: (
        [strided, contiguous],
        {
            "the tail is lost": lambda n, p, i: iter(range(n)[i * (n // p) :][: n // p]),
            "shards overlap": lambda n, p, i: iter(range(n)[i * -(-n // p) :][: -(-n // p) + 1]),
            "each process shuffles by its own seed": lambda n, p, i: iter(permuted(n, i)[i::p]),
        },
    ),
    once_in_batches: (
        [of_all_batches],
        {"examples are shuffled, and labels are not": with_labels_in_order},
    ),
    padded: (
        [lambda x, y: padding(x, y, [1.0] * len(x) + [0.0] * (4 - len(x)))],
        {
            "padding has no weight of zero": lambda x, y: padding(x, y, None),
            "padding is told from real examples by the label 0": lambda x, y: padding(
                x, y, [float(label != 0) for label in y] + [0.0] * (4 - len(x))
            ),
        },
    ),
    equal: (
        [
            lambda n, b, p, i: process_batches(n, b, p, i, "drop"),
            lambda n, b, p, i: in_batches(range(n)[: n // p * p][i::p], b // p),
        ],
        {
            "the last batch is of one process only": dealt_whole_batches,
            "shards differ by one example": lambda n, b, p, i: process_batches(
                n, b, p, i, "balance"
            ),
        },
    ),
    ordered: (
        [parts_of_batches],
        {
            "the seed depends on the replicas": lambda n, b, r: parts_of_batches(n, b, r, seed=r),
            "each replica drops its remainder": functools.partial(parts_of_batches, drop=True),
        },
    ),
    divided: (
        [parts_of],
        {
            "a batch is split as evenly as can be": np.array_split,
            "a batch is split in strides": lambda x, r: [x[i::r] for i in range(r)],
        },
    ),
    padded_loss: (
        [rescaled],
        {
            "a padded example counts in the mean": lambda w: np.append(w, [0.0] * (6 - len(w))),
            "padding replaces the sample weights": lambda w: rescaled(np.ones(len(w))),
        },
    ),
    shuffled: (
        [epoch_orders],
        {
            "every epoch has the first one's order": permuted,
            "the order does not follow from the seed": lambda n, _: epoch_orders(
                n, time.perf_counter_ns()
            ),
        },
    ),
    scheduled: (
        [decaying],
        {
            "the decay counts from step 0": lambda s, w, t: s / w if s < w else 1 - s / t,
            "the rate jumps to the peak": lambda s, w, t: (
                0.5 * s / w if s < w else decaying(s, w, t)
            ),
        },
    ),
    accumulated: (
        [mean_gradient],
        {
            "uneven micro-batches weigh the same": lambda parts: np.mean(
                [part.mean(0) for part in parts], 0
            ),
        },
    ),
    computed: (
        [mean_gradient, lambda parts: sum(part.sum(0) for part in parts)],
        {
            "the loss divides by the replica's examples": lambda parts: np.mean(
                [part.mean(0) for part in parts if len(part)], 0
            ),
            "a replica without examples gives NaN": lambda parts: sum(
                part.sum(0) / np.float64(len(part)) * len(part) for part in parts
            ),
        },
    ),
    resumed: (
        [lambda n, steps: in_batches([*range(n)][2 * steps :], 2)],
        {
            "a resumed run reads its last batch again": lambda n, steps: in_batches(
                [*range(n)][2 * max(steps - 1, 0) :], 2
            ),
            "a resumed run shuffles again": lambda n, steps: in_batches(
                permuted(n, steps)[2 * steps :].tolist(), 2
            ),
        },
    ),
    tensorflow_once: (
        [lambda dataset, n, size: dataset.batch(size).repeat().take(-(-n // size))],
        {
            "tf.data: repeat comes before batch": lambda dataset, n, size: (
                dataset.repeat().batch(size).take(-(-n // size))
            ),
        },
    ),
    tensorflow_epochs: (
        [lambda dataset, n, seed: dataset.cache().shuffle(n, seed=seed)],
        {
            "tf.data: shuffle comes before cache": lambda dataset, n, seed: dataset.shuffle(
                n, seed=seed
            ).cache(),
        },
    ),
    by_itself: (
        [
            lambda: PerBatch(lambda x: x - ops.mean(x, 1, keepdims=True)),
            lambda: mean_of_each,
            lambda: MeanOfMeans(weighs=True),
        ],
        {
            "a layer has a mean over the batch": lambda: PerBatch(lambda x: x - ops.mean(x, 0)),
            "a loss is one number": lambda: mean_over_own,
            "a metric averages batches": lambda: MeanOfMeans(weighs=False),
        },
    ),
    trained: (
        [compiled(exact=True)],
        {"a loss divides by its replica's examples": compiled(exact=False)},
    ),
}
TRIES = {
    by_itself: 2,
    trained: 2,
    tensorflow_once: 10,
    tensorflow_epochs: 10,
}
SLOW = (by_itself, trained)


def case(law, value, name):
    return pytest.param(law, value, id=name, marks=[pytest.mark.slow] if law in SLOW else [])


WRONG = [
    case(law, wrong, name) for law, (_, all_) in MISTAKES.items() for name, wrong in all_.items()
]
RIGHT = [case(law, twins, law.__name__) for law, (twins, _) in MISTAKES.items()]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("law", "mistake"), WRONG)
def test_a_mistake_is_found_with_few_examples(law, mistake):
    with pytest.raises(AssertionError):
        settings(max_examples=100)(law(mistake))()
    assert drawn[-1] <= MOST_EXAMPLES


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("law", "twins"), RIGHT)
def test_what_is_right_passes(law, twins):
    for twin in twins:
        settings(max_examples=TRIES.get(law, 50))(law(twin))()
