"""Data of every kind that `Resume.track` takes goes on where a run was stopped."""

import keras
import numpy as np
import pytest

from kdpkit import testing
from kdpkit.batches import ArrayBatches
from kdpkit.callbacks import Resume
from kdpkit.training import TrainingLoop, replica_exact
from tests.callbacks.test_resume import CrashAt, CrashError, assert_same_weights

grain = pytest.importorskip("grain")
ON_JAX = keras.backend.backend() == "jax"
EXAMPLES, SIZE, EPOCHS = 23, 5, 3
X, Y = testing.toy_classification(EXAMPLES)


def model_of_order():
    """A model whose weights depend on the order of its batches."""
    keras.utils.set_random_seed(0)
    model = testing.tiny_classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss)
    return replica_exact(model)


def by_fit(data, resume, crash, steps=None):
    model = model_of_order()
    settings = {"epochs": EPOCHS, "steps_per_epoch": steps, "shuffle": False, "verbose": 0}
    held_out = ArrayBatches((X, Y), global_batch_size=8)
    model.fit(data, callbacks=[resume, crash], validation_data=held_out, **settings)
    return model.get_weights()


def by_loop(data, resume, crash, steps=None):
    model = model_of_order()
    loop = TrainingLoop(model, optimizer=model.optimizer, loss=model.loss)
    settings = {"epochs": EPOCHS, "steps_per_epoch": steps, "verbose": 0}
    loop.fit(data, callbacks=[resume, crash], **settings)
    return model.get_weights()


def by_fit_on_two_replicas(data, resume, crash, steps=None):
    if ON_JAX:
        devices = [f"cpu:{i}" for i in range(2)]
        scope = keras.distribution.DataParallel(devices=devices).scope()
    else:
        from kdpkit import strategies

        scope = strategies.select_strategy("mirrored", devices=2).scope()
    with scope:
        return by_fit(data, resume, crash, steps)


def trained(directory, make, train=by_fit, crash_at=None, steps=None, **settings):
    keras.utils.set_random_seed(0)
    resume = Resume(directory, save_freq=1)
    return train(resume.track(make(), **settings), resume, CrashAt(crash_at), steps)


def assert_goes_on(tmp_path, make, train=by_fit, stops=(1, 4, 7), **settings):
    """Stop a run before some steps, one after the other, and go on to the end."""
    complete = trained(tmp_path / "complete", make, train, **settings)
    for stop, next_stop in zip((0, *stops), stops, strict=False):
        with pytest.raises(CrashError):
            trained(tmp_path / "stopped", make, train, next_stop - stop, **settings)
    assert_same_weights(trained(tmp_path / "stopped", make, train, **settings), complete)


# Pipelines of tf.data.


def shuffled():
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices((X, Y)).cache()
    return examples.shuffle(EXAMPLES, seed=3).map(lambda x, y: (2 * x, y)).batch(SIZE).prefetch(1)


def of_the_global_seed():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES).batch(SIZE)


def endless():
    return shuffled().repeat()


def repeated():
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=3)
    return examples.repeat(2).batch(SIZE)


def pairs():
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    first, second = examples.shuffle(9, seed=1), examples.shuffle(9, seed=2)
    together = tf.data.Dataset.zip((first, second)).map(lambda a, b: (a[0] + b[0], a[1]))
    return together.filter(lambda _, y: y < 2).apply(known(of_two_classes())).batch(SIZE)


def of_two_classes():
    import tensorflow as tf

    first = tf.data.Dataset.from_tensor_slices(Y).shuffle(9, seed=1)
    return sum(int(y) < 2 for y in first)


def known(count):
    import tensorflow as tf

    return tf.data.experimental.assert_cardinality(count)


def in_batches():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


def from_python():
    import tensorflow as tf

    spec = (tf.TensorSpec(X.shape[1:], tf.float32), tf.TensorSpec([], tf.int64))
    examples = tf.data.Dataset.from_generator(
        lambda: zip(X.astype("float32"), Y, strict=True), output_signature=spec
    )
    return examples.apply(known(EXAMPLES)).shuffle(EXAMPLES, seed=2).batch(SIZE)


PIPELINES = [shuffled, of_the_global_seed, repeated, pairs, in_batches]


@pytest.mark.parametrize(
    ("make", "train"),
    [
        (shuffled, by_fit),
        pytest.param(pairs, by_loop, marks=pytest.mark.slow),
        *(
            pytest.param(make, train, marks=pytest.mark.exhaustive)
            for make, train in (
                *((make, by_fit) for make in (*PIPELINES[1:], from_python)),
                *((shuffled, train) for train in (by_loop, by_fit_on_two_replicas)),
                (from_python, by_fit_on_two_replicas),
            )
        ),
    ],
)
def test_a_run_on_a_plain_pipeline_goes_on(tmp_path, make, train):
    assert_goes_on(tmp_path, make, train)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("train", [by_fit, by_loop, by_fit_on_two_replicas])
def test_a_run_on_what_never_ends_goes_on(tmp_path, train):
    assert_goes_on(tmp_path, endless, train, stops=(5, 10), steps=4)


# Arrays.


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("data", [(X, Y), (X, Y, 1.0 + Y)])
def test_a_run_on_arrays_goes_on(tmp_path, data, seed):
    assert_goes_on(tmp_path, lambda: data, global_batch_size=SIZE, seed=seed)


@pytest.mark.parametrize("batches", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_an_epoch_of_few_batches_is_trained_once(tmp_path, batches):
    """Keras takes two batches to know their shapes, which may be all of the epoch."""
    taken = []

    def seen(batch, _):
        taken.append(batch[0].copy())
        return batch

    def make(augment=None):
        data = (X[: 4 * batches], Y[: 4 * batches])
        return ArrayBatches(data, global_batch_size=4, seed=1, augment=augment)

    complete = trained(tmp_path / "complete", lambda: make(seen))
    orders = make()
    for epoch in reversed(range(EPOCHS)):
        orders.epoch = epoch
        last = [taken.pop() for _ in range(batches)][::-1]
        assert [x.tolist() for x in last] == [orders[i][0].tolist() for i in range(batches)]
    for stop in (1, 1):
        with pytest.raises(CrashError):
            trained(tmp_path / "stopped", make, crash_at=stop)
    assert_same_weights(trained(tmp_path / "stopped", make), complete)


# Grain.


def of_examples():
    return grain.MapDataset.source([*zip(X, Y, strict=True)]).seed(4)


def grain_map():
    return of_examples().shuffle().batch(SIZE)


def grain_repeated():
    return of_examples().shuffle().repeat().batch(SIZE)


def grain_filtered():
    kept = of_examples().shuffle().repeat().filter(lambda pair: pair[1] < 2)
    return kept.to_iter_dataset().batch(SIZE)


def grain_that_ends():
    examples = of_examples().shuffle().filter(lambda pair: pair[1] < 2).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(examples, window_size=6, seed=1).batch(3)


def grain_packed():
    tokens = of_examples().map(lambda pair: {"x": np.full(1 + pair[1], pair[0][0], "float32")})
    packed = grain.experimental.FirstFitPackIterDataset(
        tokens.shuffle().repeat().to_iter_dataset(), length_struct={"x": 4}, num_packing_bins=3
    )
    return packed.map(lambda row: (row["x"], np.int64(row["x_segment_ids"].max() % 3))).batch(4)


def grain_loader():
    return grain.DataLoader(
        data_source=[*zip(X, Y, strict=True)],
        sampler=grain.samplers.IndexSampler(EXAMPLES, shuffle=True, seed=1),
        operations=[grain.transforms.Batch(SIZE)],
    )


ON_BOTH = [pytest.mark.jax] if ON_JAX else []  # in the slow tests of each backend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "steps", "train"),
    [
        pytest.param(grain_filtered, 4, by_fit_on_two_replicas, marks=ON_BOTH),
        pytest.param(grain_packed, 4, by_fit, marks=ON_BOTH),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in [
                (grain_map, None, by_fit),
                (grain_map, None, by_fit_on_two_replicas),
                (grain_repeated, 4, by_fit),
                (grain_filtered, 4, by_fit),
                (grain_that_ends, 4, by_fit),
                (grain_loader, 4, by_fit),
            ]
        ),
        *([(grain_map, None, by_loop), (grain_filtered, 4, by_loop)] if ON_JAX else []),
    ],
)
def test_a_run_on_a_grain_dataset_goes_on(tmp_path, make, steps, train):
    assert_goes_on(tmp_path, make, train, stops=(5, 10), steps=steps)


@pytest.mark.slow
def test_a_run_on_grain_goes_on_with_another_number_of_replicas(tmp_path):
    complete = trained(tmp_path / "complete", grain_filtered, steps=4)
    with pytest.raises(CrashError):
        trained(tmp_path / "stopped", grain_filtered, by_fit_on_two_replicas, 6, steps=4)
    resumed = trained(tmp_path / "stopped", grain_filtered, steps=4)
    for one, other in zip(resumed, complete, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# What cannot be gone on with.


@pytest.mark.parametrize(
    ("add", "sentence"),
    [
        (lambda data, _: data.shuffle(3), r"`shuffle\(3\)` has another order.*`seed="),
        (lambda data, tf: data.map(lambda _: tf.random.uniform([])), "map.*stateless"),
        (lambda data, _: data.shuffle(3, seed=1).cache(), "cache.*Move `shuffle` after it"),
        (
            lambda data, tf: (
                data.interleave(lambda x: tf.data.Dataset.from_tensors(x), num_parallel_calls=2)
                .cache()
                .apply(tf.data.experimental.assert_cardinality(9))
            ),
            "stage='cache'.*without `num_parallel_calls`",
        ),
        (lambda data, _: data.filter(lambda x: x > 3), "assert_cardinality"),
        (lambda data, tf: data.flat_map(lambda _: tf.data.Dataset.range(3).shuffle(3)), "flat_map"),
    ],
)
def test_a_pipeline_of_unknown_order_or_length_raises(tmp_path, add, sentence):
    import tensorflow as tf

    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=sentence):
        Resume(tmp_path).track(add(tf.data.Dataset.range(9), tf))
