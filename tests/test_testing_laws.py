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
    of_process = scaling.shard_indices(examples, processes, index, remainder=remainder)
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


def lost_header(dataset, _, size):
    return dataset.skip(1).batch(size)


def with_last(dataset, _, size):
    return dataset.batch(size)


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


# Each law, the mistake, and its correct twin.
MISTAKES = {
    "the tail is lost": (
        once,
        lambda n, p, i: iter(range(n)[i * (n // p) :][: n // p]),
        contiguous,
    ),
    "shards overlap": (
        once,
        lambda n, p, i: iter(range(n)[i * -(-n // p) :][: -(-n // p) + 1]),
        contiguous,
    ),
    "the index begins at one": (once, lambda n, p, i: iter(range(i + 1, n, p)), strided),
    "strides are one too short": (
        once,
        lambda n, p, i: iter(range(i, n, max(p - 1, 1))),
        strided,
    ),
    "a shard wraps around": (
        once,
        lambda n, p, i: iter(k % n for k in range(i * -(-n // p), (i + 1) * -(-n // p))),
        contiguous,
    ),
    "each process shuffles by its own seed": (
        once,
        lambda n, p, i: iter(permuted(n, i)[i::p]),
        lambda n, p, i: iter(permuted(n, 0)[i::p]),
    ),
    "a shard's start is rounded": (
        once,
        lambda n, p, i: iter(range(round(n * i / p), n)[: -(-n // p)]),
        lambda n, p, i: iter(range(n * i // p, n * (i + 1) // p)),
    ),
    "examples are drawn with replacement": (
        once_in_batches,
        lambda x, n, b: of_all_batches(rows(x, np.random.default_rng(0).integers(0, n, n)), n, b),
        of_shuffled_batches,
    ),
    "evaluation drops the remainder": (
        once_in_batches,
        lambda x, n, b: of_all_batches(x, n, b)[: n // b],
        of_all_batches,
    ),
    "the last batch is never reached": (
        once_in_batches,
        lambda x, n, b: of_all_batches(x, n, b)[: -(-n // b) - 1],
        of_all_batches,
    ),
    "examples are shuffled, and labels are not": (
        once_in_batches,
        with_labels_in_order,
        of_shuffled_batches,
    ),
    "padding has no weight of zero": (
        padded,
        lambda x, y: padding(x, y, None),
        lambda x, y: padding(x, y, [1.0] * len(x) + [0.0] * (4 - len(x))),
    ),
    "the weights of padding come first": (
        padded,
        lambda x, y: padding(x, y, [0.0] * (4 - len(x)) + [1.0] * len(x)),
        lambda x, y: padding(x, y, [1.0] * len(x) + [0.0] * (4 - len(x))),
    ),
    "the last batch is of one process only": (
        equal,
        dealt_whole_batches,
        lambda n, b, p, i: process_batches(n, b, p, i, "drop"),
    ),
    "shards differ by one example": (
        equal,
        lambda n, b, p, i: process_batches(n, b, p, i, "balance"),
        lambda n, b, p, i: process_batches(n, b, p, i, "drop"),
    ),
    "each process filters its own shard": (
        equal,
        lambda n, b, p, i: in_batches([k for k in range(i, n, p) if k % 3], b // p),
        lambda n, b, p, i: in_batches(range(n)[: n // p * p][i::p], b // p),
    ),
    "the seed depends on the replicas": (
        ordered,
        lambda n, b, r: parts_of_batches(n, b, r, seed=r),
        parts_of_batches,
    ),
    "each replica drops its remainder": (
        ordered,
        functools.partial(parts_of_batches, drop=True),
        parts_of_batches,
    ),
    "a batch is dealt out like cards": (
        ordered,
        functools.partial(parts_of_batches, strides=True),
        parts_of_batches,
    ),
    "replicas read shards of the epoch": (
        ordered,
        lambda n, b, r: [in_batches([*contiguous(n, r, i)], b // r) for i in range(r)],
        lambda n, b, _: in_batches(range(n), b),
    ),
    "a batch is split as evenly as can be": (
        divided,
        np.array_split,
        lambda x, r: np.split(x, np.cumsum(scaling.split_batch(len(x), r))[:-1]),
    ),
    "the last replica gets the remainder": (
        divided,
        lambda x, r: (
            [x[i * (len(x) // r) :][: len(x) // r] for i in range(r - 1)]
            + [x[(r - 1) * (len(x) // r) :]]
        ),
        lambda x, r: [x[i * -(-len(x) // r) :][: -(-len(x) // r)] for i in range(r)],
    ),
    "a batch is split in strides": (
        divided,
        lambda x, r: [x[i::r] for i in range(r)],
        lambda x, r: [x[i * -(-len(x) // r) :][: -(-len(x) // r)] for i in range(r)],
    ),
    "a padded example counts in the mean": (
        padded_loss,
        lambda w: np.append(w, [0.0] * (6 - len(w))),
        lambda w: np.append(w, [0.0] * (6 - len(w))) * 6 / len(w),
    ),
    "padding replaces the sample weights": (
        padded_loss,
        lambda w: np.append(np.ones(len(w)), [0.0] * (6 - len(w))) * 6 / len(w),
        lambda w: np.append(w, [0.0] * (6 - len(w))) * 6 / len(w),
    ),
    "every epoch has the first one's order": (
        shuffled,
        lambda n, seed: permuted(n, seed),
        epoch_orders,
    ),
    "the order does not follow from the seed": (
        shuffled,
        lambda n, _: epoch_orders(n, time.perf_counter_ns()),
        epoch_orders,
    ),
    "the decay counts from step 0": (
        scheduled,
        lambda s, w, t: s / w if s < w else 1 - s / t,
        lambda s, w, t: s / w if s < w else 1 - (s - w) / (t - w),
    ),
    "the decay is as long as the run": (
        scheduled,
        lambda s, w, t: s / w if s < w else 1 - (s - w) / t,
        lambda s, w, t: s / w if s < w else 1 - (s - w) / (t - w),
    ),
    "the warmup is a step ahead": (
        scheduled,
        lambda s, w, t: min((s + 1) / w, 1) if s < w else 1 - (s - w) / (t - w),
        lambda s, w, t: s / w if s < w else 1 - (s - w) / (t - w),
    ),
    "the rate jumps to the peak": (
        scheduled,
        lambda s, w, t: 0.5 * s / w if s < w else 1 - (s - w) / (t - w),
        lambda s, w, t: s / w if s < w else 1 - (s - w) / (t - w),
    ),
    "uneven micro-batches weigh the same": (
        accumulated,
        lambda parts: np.mean([part.mean(0) for part in parts], 0),
        mean_gradient,
    ),
    "micro-batches are summed": (
        accumulated,
        lambda parts: np.sum([part.mean(0) for part in parts], 0),
        mean_gradient,
    ),
    "each micro-batch is clipped": (
        accumulated,
        lambda parts: sum(clipped(part.sum(0)) for part in parts),
        lambda parts: clipped(sum(part.sum(0) for part in parts)),
    ),
    "the loss divides by the replica's examples": (
        computed,
        lambda parts: np.mean([part.mean(0) for part in filled(parts)], 0),
        mean_gradient,
    ),
    "a gradient is clipped before the sum": (
        computed,
        lambda parts: sum(clipped(part.sum(0)) for part in parts),
        lambda parts: clipped(sum(part.sum(0) for part in parts)),
    ),
    "gradients of means are summed": (
        computed,
        lambda parts: np.sum([part.mean(0) for part in filled(parts)], 0),
        mean_gradient,
    ),
    "each replica has its own statistics": (
        computed,
        lambda parts: [np.mean([normalised([part])[0] for part in filled(parts)])],
        normalised,
    ),
    "a replica without examples gives NaN": (
        computed,
        lambda parts: sum(part.sum(0) / np.float64(len(part)) * len(part) for part in parts),
        lambda parts: sum(part.sum(0) for part in parts),
    ),
    "a resumed run reads its last batch again": (
        resumed,
        lambda n, steps: iter(numbers_in_batches(n)[max(steps - 1, 0) :]),
        lambda n, steps: iter(numbers_in_batches(n)[steps:]),
    ),
    "a resumed run begins the epoch again": (
        resumed,
        lambda n, _: iter(numbers_in_batches(n)),
        lambda n, steps: iter(numbers_in_batches(n)[steps:]),
    ),
    "a resumed run skips examples for batches": (
        resumed,
        lambda n, steps: in_batches([*range(n)][steps:], 2),
        lambda n, steps: in_batches([*range(n)][2 * steps :], 2),
    ),
    "a resumed run shuffles again": (
        resumed,
        shuffled_again,
        lambda n, steps: in_batches(permuted(n).tolist()[2 * steps :], 2),
    ),
}
OF_TENSORFLOW = {
    "tf.data: a header is skipped that is not there": (tensorflow_once, lost_header, with_last),
    "tf.data: the remainder is dropped": (
        tensorflow_once,
        lambda ds, _, b: ds.batch(b, drop_remainder=True),
        with_last,
    ),
    "tf.data: repeat comes before batch": (
        tensorflow_once,
        lambda ds, n, b: ds.repeat().batch(b).take(-(-n // b)),
        lambda ds, n, b: ds.batch(b).repeat().take(-(-n // b)),
    ),
    "tf.data: shards are shuffled by other seeds": (
        tensorflow_shards,
        shuffled_shard(lambda index: index),
        shuffled_shard(lambda _: 0),
    ),
    "tf.data: batches are dealt out": (tensorflow_shards, batches_dealt, padded_batches),
    "tf.data: shuffle comes before cache": (
        tensorflow_epochs,
        lambda ds, n, seed: ds.shuffle(n, seed=seed).cache(),
        lambda ds, n, seed: ds.cache().shuffle(n, seed=seed),
    ),
    "tf.data: the shuffle has no seed": (
        tensorflow_epochs,
        lambda ds, n, _: ds.shuffle(n),
        lambda ds, n, seed: ds.shuffle(n, seed=seed),
    ),
}
OF_MODELS = {
    "a layer has a mean over the batch": (
        by_itself,
        lambda: PerBatch(lambda x: x - ops.mean(x, 0)),
        lambda: PerBatch(lambda x: x - ops.mean(x, 1, keepdims=True)),
    ),
    "a layer compares neighbours": (
        by_itself,
        lambda: PerBatch(lambda x: x + ops.roll(x, 1, 0)),
        lambda: PerBatch(lambda x: x + ops.roll(x, 1, 1)),
    ),
    "a loss is one number": (by_itself, lambda: mean_over_own, lambda: mean_of_each),
    "a metric averages batches": (
        by_itself,
        lambda: MeanOfMeans(weighs=False),
        lambda: MeanOfMeans(weighs=True),
    ),
    "Keras clips each replica's gradient": (
        trained,
        compiled(plain, clipnorm=0.01),
        compiled(replica_exact, clipnorm=0.01),
    ),
    "a loss divides by its replica's examples": (
        trained,
        compiled(plain, mean_over_own),
        compiled(replica_exact, mean_over_own),
    ),
}
CASES = [
    *(pytest.param(*case, 100, id=name) for name, case in MISTAKES.items()),
    *(pytest.param(*case, 10, id=name) for name, case in OF_TENSORFLOW.items()),
    *(pytest.param(*case, 2, id=name, marks=pytest.mark.slow) for name, case in OF_MODELS.items()),
]


def test_there_are_forty_mistakes():
    assert len(CASES) >= 40


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("law", "mistake", "twin", "tries"), CASES)
def test_a_mistake_is_found_with_few_examples_and_its_twin_passes(law, mistake, twin, tries):
    start = time.process_time()  # of all threads: what other processes do is no part of it
    with pytest.raises(AssertionError):
        law(mistake)()
    assert time.process_time() - start < MOST_SECONDS
    assert drawn[-1] <= MOST_EXAMPLES
    settings(max_examples=tries)(law(twin))()
