"""Planted mistakes, each with a correct twin: a law finds the one, and lets the other pass."""

import functools
import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from keras import ops

from kdpkit import batches, scaling
from kdpkit.testing import generators, laws
from kdpkit.training import replica_exact

pytestmark = pytest.mark.tensorflow

MOST_EXAMPLES = 5  # of a counterexample
MOST_SECONDS = 10

# How many examples each call of a law had; the last one is the counterexample.
drawn = []


def once(shard):
    """Shards of the numbers from 0 on: `shard(examples, processes, index)`."""

    @given(generators.shards())
    def law(shards):
        drawn.append(shards.examples)
        processes = shards.processes
        read = [shard(shards.examples, processes, index) for index in range(processes)]
        laws.every_example_once(read, examples=shards.examples)

    return law


def once_in_batches(read):
    """Batches of nested examples on one process: `read(examples, indices)`, a list of them."""

    @given(generators.nested_examples(min_size=1), generators.global_batch_sizes(max_value=5))
    def law(examples, size):
        count = batches.num_examples(examples)
        drawn.append(count)
        laws.every_example_once(iter(read(examples, count, size)), examples=examples)

    return law


def padded(pad):
    """Batches `(x, y)` that are padded to 4 examples: `pad(x, y)`."""

    @given(generators.labelled_batches(max_size=4))
    def law(batch):
        drawn.append(len(batch[0]))
        laws.every_example_once(iter([pad(*batch)]), examples=batch)

    return law


def equal(shard):
    """The batches of processes: `shard(examples, global_batch_size, processes, index)`."""

    @given(generators.shards())
    def law(shards):
        drawn.append(shards.examples)
        laws.equal_steps([shard(*shards, index) for index in range(shards.processes)])

    return law


def ordered(read):
    """What replicas read: `read(examples, global_batch_size, replicas)`."""

    @given(generators.shards())
    def law(shards):
        drawn.append(shards.examples)
        examples, size, replicas = shards
        laws.same_examples_for_any_replicas(
            lambda count: read(examples, size, count), replicas=replicas
        )

    return law


def divided(split):
    """A batch for replicas: `split(batch, replicas)`."""

    @given(generators.splits())
    def law(drawn_split):
        drawn.append(drawn_split.global_batch_size)
        batch = np.arange(drawn_split.global_batch_size)
        laws.split_as_tf_distribute(split(batch, drawn_split.replicas), of=batch)

    return law


def padded_loss(pad):
    """Weights of a batch that is padded to 6 examples: `pad(weights)`."""

    def loss(x, y, weight):
        return np.mean(weight * (x[:, 0] - y) ** 2)

    @given(generators.labelled_batches(max_size=6, weighted=True))
    def law(batch):
        x, y, weights = batch
        drawn.append(len(x))
        indices, _ = scaling.padded_examples(len(x), 6)
        laws.padding_keeps_the_loss(loss, batch, (x[[*indices]], y[[*indices]], pad(weights)))

    return law


def shuffled(orders):
    """Orders of an epoch after the other: `orders(examples, seed)`."""

    @given(generators.example_counts(max_value=12), st.integers(0, 3))
    def law(examples, seed):
        drawn.append(examples)
        laws.reproducible(lambda seed: orders(examples, seed), seed=seed)

    return law


def scheduled(rate):
    """A warmup to 1 and a decay to 0: `rate(step, warmup, total)`."""

    @given(st.integers(1, 8), st.integers(1, 8))
    def law(warmup, decay):
        drawn.append(0)
        ends = {0: 0.0, warmup: 1.0, warmup + decay: 0.0}
        laws.continuous_schedule(lambda step: rate(step, warmup, warmup + decay), through=ends)

    return law


def accumulated(update):
    """An update from the examples of micro-batches: `update(list of x)`."""

    @given(generators.labelled_batches(), st.integers(1, 4))
    def law(batch, steps):
        assume(steps <= len(batch[0]))
        drawn.append(len(batch[0]))
        laws.accumulation_equals_the_batch(update, batch[0], steps=steps)

    return law


def computed(compute):
    """What replicas compute of the examples that they have: `compute(list of x)`."""

    @given(generators.splits(min_size=1, max_size=12))
    def law(split):
        drawn.append(split.global_batch_size)
        x, _ = scaled_data(split.global_batch_size)

        def on(replicas):
            ends = np.cumsum(scaling.split_batch(len(x), replicas))[:-1]
            return compute(np.split(x, ends))

        laws.same_numbers_for_any_replicas(on, replicas=split.replicas)

    return law


def resumed(resume):
    """What is read after a stop: `resume(examples, after)`, in batches of 2."""

    @given(generators.example_counts(min_value=1), st.integers(0, 8))
    def law(examples, after):
        assume(after <= (examples + 1) // 2)
        drawn.append(examples)
        laws.resumed_run_continues(lambda steps: resume(examples, steps), after=after)

    return law


def tensorflow_once(pipeline):
    """A tf.data pipeline of single examples: `pipeline(dataset, examples, size)`."""

    @given(generators.datasets(kinds=("int", "text", "ragged")))
    def law(data):
        drawn.append(len(data))
        read = pipeline(data.source, len(data), data.global_batch_size)
        laws.every_example_once(read, examples=data.examples)

    return law


def tensorflow_shards(pipeline):
    """A tf.data pipeline of processes: `pipeline(dataset, global_batch_size, processes, index)`."""

    @given(generators.shards(max_examples=12))
    def law(shards):
        drawn.append(shards.examples)
        dataset = tf.data.Dataset.range(shards.examples)
        read = [pipeline(dataset, *shards[1:], index) for index in range(shards.processes)]
        laws.every_example_once(read, examples=shards.examples)
        laws.equal_steps(read)

    return law


def tensorflow_epochs(pipeline):
    """A tf.data pipeline that is shuffled: `pipeline(dataset, examples, seed)`."""

    @given(generators.example_counts(max_value=8))
    def law(examples):
        drawn.append(examples)
        dataset = tf.data.Dataset.range(examples)
        laws.reproducible(lambda seed: pipeline(dataset, max(examples, 1), seed))

    return law


def by_itself(part):
    """A layer, a loss or a metric: `part()`."""

    @given(generators.labelled_batches(min_size=2, max_size=5))
    def law(batch):
        x, _ = batch
        drawn.append(len(x))
        made = part()
        inputs = (x,) if isinstance(made, keras.Layer) else (x, 2 * x)
        laws.per_example(made, *inputs)

    return law


def trained(build):
    """A compiled model: `build()`."""

    @given(st.sampled_from([3, 5]))  # each trains three to five models, which takes seconds
    def law(examples):
        drawn.append(examples)
        laws.same_training_for_any_replicas(build, scaled_data(examples), replicas=2)

    return law


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


def of_all_batches(examples, count, size):
    return [rows(examples, part) for part in in_batches(np.arange(count), size)]


def of_shuffled_batches(examples, count, size):
    return [rows(examples, part) for part in in_batches(permuted(count), size)]


def with_labels_in_order(examples, count, size):
    if isinstance(examples, tuple):
        x, *labels = examples
        examples = (rows(x, np.arange(count)[::-1]), *labels)
    return of_all_batches(examples, count, size)


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


def parts_of_batches(examples, size, replicas, *, seed=0, drop=False, strides=False):
    order, per_replica = permuted(examples, seed), size // replicas
    shards = []
    for index in range(replicas):
        own = [batch[index * per_replica :][:per_replica] for batch in in_batches(order, size)]
        if strides:
            own = [batch[index::replicas] for batch in in_batches(order, size)]
        shards.append(iter([part for part in own if not drop or len(part) == per_replica]))
    return shards


def epoch_orders(examples, *seed):
    return (permuted(examples, *seed, epoch) for epoch in itertools.count())


def mean_gradient(parts):
    return np.sum([part.sum(0) for part in parts], 0) / sum(map(len, parts))


def clipped(gradient):
    return gradient / max(1.0, np.linalg.norm(gradient) / 0.1)


def filled(parts):
    return [part for part in parts if len(part)]


def normalised(parts):
    everything = np.concatenate(parts)
    return [(everything - everything.mean(0)).std()]


def numbers_in_batches(examples):
    return [*in_batches([*range(examples)], 2)]


def shuffled_again(examples, steps):
    return in_batches(permuted(examples, steps)[2 * steps :].tolist(), 2)


def batches_dealt(dataset, size, processes, index):
    return dataset.batch(size).shard(processes, index)


def padded_batches(dataset, size, processes, index):
    """Each process has its part of every batch; where there is none, a batch of none."""
    part = size // processes
    return dataset.batch(size).map(lambda batch: batch[index * part :][:part])


def shuffled_shard(seed):
    def pipeline(dataset, size, processes, index):
        count = max(int(dataset.cardinality()), 1)
        return padded_batches(dataset.shuffle(count, seed=seed(index)), size, processes, index)

    return pipeline


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


def compiled(wrap, loss="mse", **optimizer):
    def build():
        start = keras.initializers.GlorotUniform(seed=1)
        layers = [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=start)]
        model = wrap(keras.Sequential(layers))
        model.compile(keras.optimizers.SGD(0.1, **optimizer), loss)
        return model

    return build


def mean_over_own(y, predictions):
    return ops.mean(ops.square(y - predictions))


def mean_of_each(y, predictions):
    return ops.mean(ops.square(y - predictions), axis=-1)


def plain(model):
    return model


def parts_of(x, replicas):
    return np.split(x, np.cumsum(scaling.split_batch(len(x), replicas))[:-1])


def decaying(s, w, t):
    return s / w if s < w else 1 - (s - w) / (t - w)


def rescaled(weights):
    return np.append(weights, [0.0] * (6 - len(weights))) * 6 / len(weights)


def clipped_sum(parts):
    return clipped(sum(part.sum(0) for part in parts))


def sum_of_clipped(parts):
    return sum(clipped(part.sum(0)) for part in parts)


# Of each law what keeps it, and mistakes.
MISTAKES = {
    once: (
        [strided, contiguous, lambda n, p, i: iter(range(n * i // p, n * (i + 1) // p))],
        {
            "the tail is lost": lambda n, p, i: iter(range(n)[i * (n // p) :][: n // p]),
            "shards overlap": lambda n, p, i: iter(range(n)[i * -(-n // p) :][: -(-n // p) + 1]),
            "the index begins at one": lambda n, p, i: iter(range(i + 1, n, p)),
            "strides are one too short": lambda n, p, i: iter(range(i, n, max(p - 1, 1))),
            "a shard wraps around": lambda n, p, i: iter(
                k % n for k in range(i * -(-n // p), (i + 1) * -(-n // p))
            ),
            "each process shuffles by its own seed": lambda n, p, i: iter(permuted(n, i)[i::p]),
            "a shard's start is rounded": lambda n, p, i: iter(
                range(round(n * i / p), n)[: -(-n // p)]
            ),
        },
    ),
    once_in_batches: (
        [of_all_batches, of_shuffled_batches],
        {
            "examples are drawn with replacement": lambda x, n, b: of_all_batches(
                rows(x, np.random.default_rng(0).integers(0, n, n)), n, b
            ),
            "evaluation drops the remainder": lambda x, n, b: of_all_batches(x, n, b)[: n // b],
            "the last batch is never reached": lambda x, n, b: of_all_batches(x, n, b)[
                : -(-n // b) - 1
            ],
            "examples are shuffled, and labels are not": with_labels_in_order,
        },
    ),
    padded: (
        [lambda x, y: padding(x, y, [1.0] * len(x) + [0.0] * (4 - len(x)))],
        {
            "padding has no weight of zero": lambda x, y: padding(x, y, None),
            "padding is told from real examples by the label 0": lambda x, y: padding(
                x, y, [float(label != 0) for label in y] + [0.0] * (4 - len(x))
            ),
            "the weights of padding come first": lambda x, y: padding(
                x, y, [0.0] * (4 - len(x)) + [1.0] * len(x)
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
            "each process filters its own shard": lambda n, b, p, i: in_batches(
                [k for k in range(i, n, p) if k % 3], b // p
            ),
        },
    ),
    ordered: (
        [parts_of_batches],
        {
            "the seed depends on the replicas": lambda n, b, r: parts_of_batches(n, b, r, seed=r),
            "each replica drops its remainder": functools.partial(parts_of_batches, drop=True),
            "a batch is dealt out like cards": functools.partial(parts_of_batches, strides=True),
            "replicas read shards of the epoch": lambda n, b, r: [
                in_batches([*contiguous(n, r, i)], b // r) for i in range(r)
            ],
        },
    ),
    divided: (
        [parts_of],
        {
            "a batch is split as evenly as can be": np.array_split,
            "the last replica gets the remainder": lambda x, r: np.split(
                x, [i * (len(x) // r) for i in range(1, r)]
            ),
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
            "the decay is as long as the run": lambda s, w, t: s / w if s < w else 1 - (s - w) / t,
            "the warmup is a step ahead": lambda s, w, t: (
                min((s + 1) / w, 1) if s < w else decaying(s, w, t)
            ),
            "the rate jumps to the peak": lambda s, w, t: (
                0.5 * s / w if s < w else decaying(s, w, t)
            ),
        },
    ),
    accumulated: (
        [mean_gradient, clipped_sum],
        {
            "uneven micro-batches weigh the same": lambda parts: np.mean(
                [part.mean(0) for part in parts], 0
            ),
            "micro-batches are summed": lambda parts: np.sum([part.mean(0) for part in parts], 0),
            "each micro-batch is clipped": sum_of_clipped,
        },
    ),
    computed: (
        [mean_gradient, clipped_sum, normalised, lambda parts: sum(part.sum(0) for part in parts)],
        {
            "the loss divides by the replica's examples": lambda parts: np.mean(
                [part.mean(0) for part in filled(parts)], 0
            ),
            "a gradient is clipped before the sum": sum_of_clipped,
            "gradients of means are summed": lambda parts: np.sum(
                [part.mean(0) for part in filled(parts)], 0
            ),
            "each replica has its own statistics": lambda parts: [
                np.mean([normalised([part])[0] for part in filled(parts)])
            ],
            "a replica without examples gives NaN": lambda parts: sum(
                part.sum(0) / np.float64(len(part)) * len(part) for part in parts
            ),
        },
    ),
    resumed: (
        [
            lambda n, steps: iter(numbers_in_batches(n)[steps:]),
            lambda n, steps: in_batches(permuted(n).tolist()[2 * steps :], 2),
        ],
        {
            "a resumed run reads its last batch again": lambda n, steps: iter(
                numbers_in_batches(n)[max(steps - 1, 0) :]
            ),
            "a resumed run begins the epoch again": lambda n, _: iter(numbers_in_batches(n)),
            "a resumed run skips examples for batches": lambda n, steps: in_batches(
                [*range(n)][steps:], 2
            ),
            "a resumed run shuffles again": shuffled_again,
        },
    ),
    tensorflow_once: (
        [
            lambda dataset, _, size: dataset.batch(size),
            lambda dataset, n, size: dataset.batch(size).repeat().take(-(-n // size)),
        ],
        {
            "tf.data: a header is skipped that is not there": lambda dataset, _, size: dataset.skip(
                1
            ).batch(size),
            "tf.data: the remainder is dropped": lambda dataset, _, size: dataset.batch(
                size, drop_remainder=True
            ),
            "tf.data: repeat comes before batch": lambda dataset, n, size: (
                dataset.repeat().batch(size).take(-(-n // size))
            ),
        },
    ),
    tensorflow_shards: (
        [padded_batches, shuffled_shard(lambda _: 0)],
        {
            "tf.data: shards are shuffled by other seeds": shuffled_shard(lambda index: index),
            "tf.data: batches are dealt out": batches_dealt,
        },
    ),
    tensorflow_epochs: (
        [lambda dataset, n, seed: dataset.cache().shuffle(n, seed=seed)],
        {
            "tf.data: shuffle comes before cache": lambda dataset, n, seed: dataset.shuffle(
                n, seed=seed
            ).cache(),
            "tf.data: the shuffle has no seed": lambda dataset, n, _: dataset.shuffle(n),
        },
    ),
    by_itself: (
        [
            lambda: PerBatch(lambda x: x - ops.mean(x, 1, keepdims=True)),
            lambda: PerBatch(lambda x: x + ops.roll(x, 1, 1)),
            lambda: mean_of_each,
            lambda: MeanOfMeans(weighs=True),
        ],
        {
            "a layer has a mean over the batch": lambda: PerBatch(lambda x: x - ops.mean(x, 0)),
            "a layer compares neighbours": lambda: PerBatch(lambda x: x + ops.roll(x, 1, 0)),
            "a loss is one number": lambda: mean_over_own,
            "a metric averages batches": lambda: MeanOfMeans(weighs=False),
        },
    ),
    trained: (
        [compiled(replica_exact, clipnorm=0.01), compiled(replica_exact, mean_over_own)],
        {
            "Keras clips each replica's gradient": compiled(plain, clipnorm=0.01),
            "a loss divides by its replica's examples": compiled(plain, mean_over_own),
        },
    ),
}
TRIES = {
    by_itself: 2,
    trained: 2,
    tensorflow_once: 10,
    tensorflow_shards: 10,
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
    start = time.process_time()  # of all threads: what other processes do is no part of it
    with pytest.raises(AssertionError):
        settings(max_examples=100)(law(mistake))()
    assert time.process_time() - start < MOST_SECONDS
    assert drawn[-1] <= MOST_EXAMPLES


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("law", "twins"), RIGHT)
def test_what_is_right_passes(law, twins):
    for twin in twins:
        settings(max_examples=TRIES.get(law, 50))(law(twin))()
