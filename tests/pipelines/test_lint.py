"""Each rule finds the fault that was planted for it, and nothing in correct pipelines."""

import functools
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import callbacks, pipelines
from kdpkit.pipelines import _lint, lint
from tests.pipelines import public_pipelines
from tests.pipelines.public_pipelines import MISTAKES, TUTORIALS, mixed, noise, ordered, slices

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE


def numbers(count=200):
    return Dataset.range(count)


def decode(number):
    return tf.image.resize(tf.fill([8, 8, 3], tf.cast(number, tf.float32)), [4, 4])


def noisy(number):
    return tf.cast(number, tf.float32) + tf.random.uniform([])


def by_python(number):
    return tf.ensure_shape(tf.numpy_function(lambda n: n, [number], tf.int64), [])


def generator():
    spec = tf.TensorSpec([], tf.int64)
    return Dataset.from_generator(lambda: iter(range(200)), output_signature=spec)


def found(dataset, **settings):
    return {(finding.rule, finding.level) for finding in lint(dataset, **settings)}


def faults(dataset, **settings):
    return {rule for rule, level in found(dataset, **settings) if level != "note"}


#: For each rule pipelines with its fault. Where `fit` has to be known, ASKED has its settings.
FAULTS = {
    "batched-twice": [
        lambda: PAIRS.batch(4).batch(8),
        lambda: PAIRS.batch(4).shuffle(16).cache().take(9).batch(8).prefetch(2),
        lambda: PAIRS.padded_batch(4).batch(8),
        lambda: generator().batch(7).batch(8),  # whose last batch may be smaller
        lambda: pipelines.train_pipeline(PAIRS, global_batch_size=4).batch(8),
    ],
    "not-batched": [
        lambda: PAIRS.shuffle(64),
        lambda: PAIRS.map(lambda x, y: {"x": x, "y": y}, AUTOTUNE).prefetch(2),
    ],
    "shuffle-before-cache": [
        lambda: numbers().shuffle(200).cache().batch(20),
        lambda: Dataset.zip((numbers().shuffle(200), numbers())).cache().batch(20),
    ],
    "random-before-cache": [
        lambda: numbers().map(noisy, AUTOTUNE).cache().shuffle(200).batch(20),
        lambda: numbers().map(decode).batch(20).map(keras.layers.RandomFlip(), AUTOTUNE).cache(),
    ],
    "batch-before-shuffle": [
        lambda: numbers().cache().batch(20).map(tf.sort, AUTOTUNE).shuffle(10).prefetch(2)
    ],
    "small-shuffle": [
        lambda: numbers().filter(lambda n: n > 3).shuffle(16).map(noisy, AUTOTUNE).batch(64)
    ],
    "split-after-shuffle": [lambda: numbers().shuffle(200, seed=1).skip(80).batch(20)],
    "repeat": [lambda: numbers().batch(20).repeat(3)],
    "runs-out": [lambda: numbers().batch(20)],
    "padded-metrics": [
        lambda: PAIRS.batch(6).apply(pipelines.pad_to_global_batch(6)).prefetch(1),
        lambda: pipelines.eval_pipeline(PAIRS, global_batch_size=6, remainder="pad"),
    ],
    "short-batch": [lambda: numbers(201).batch(20)],
    "overwritten-arrays": [lambda: generator().map(by_python)],
    "repeat-before-cache": [lambda: numbers().repeat().cache().batch(20)],
    "python": [
        lambda: numbers(2).flat_map(lambda _: numbers().map(by_python)).prefetch(2),
        lambda: generator().batch(20).prefetch(2),
        lambda: pipelines.train_pipeline(
            numbers(), augment=lambda batch, _: by_python(batch[0]), global_batch_size=20
        ),
    ],
    "serial-map": [lambda: numbers().map(lambda n: decode(n) * tf.random.uniform([]))],
}
ASKED = {
    "repeat": {"epochs": 4},
    "runs-out": {"steps_per_epoch": 11},
    "overwritten-arrays": {"replicas": 2},
}
NOTES_ALONE = {"padded-metrics", "short-batch"}
PAIRS = Dataset.from_tensor_slices((np.zeros((64, 3), "float32"), np.zeros(64, "int32")))
PLANTED = [(rule, make) for rule, makes in FAULTS.items() for make in makes]


@pytest.mark.parametrize(("rule", "make"), PLANTED, ids=[rule for rule, _ in PLANTED])
def test_a_planted_fault_is_found(rule, make):
    levels = dict(found(make(), **ASKED.get(rule, {})))
    wanted = {"note"} if rule in NOTES_ALONE else {"error", "wrong", "slow"}
    assert levels[rule] in wanted


def test_every_rule_is_documented_and_has_a_planted_fault():
    items = re.findall(r"^ *- (`.*?):", lint.__doc__, re.MULTILINE | re.DOTALL)
    documented = [name for item in items for name in re.findall(r"`([\w-]+)`", item)]
    rules = {name for name, *_ in _lint._RULES}
    assert not rules ^ {*documented}, "in the docstring of `lint`, or in `_lint.py` alone"
    assert len(documented) == len(rules)
    planted = FAULTS.keys() | MISTAKES.keys()
    assert not rules ^ planted, "in `FAULTS` and `MISTAKES`, or in `_lint.py` alone"


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, pairs in MISTAKES.items() for name in pairs]
)
def test_a_public_mistake_is_found_and_nothing_in_its_twin(rule, name):
    tf.random.set_seed(None)  # with a seed every process shuffles alike
    wrong, right = MISTAKES[rule][name]
    settings = public_pipelines.FITS.get(name, {})
    assert {rule for rule, _ in found(wrong(), **settings)} == {rule}
    assert found(right(), **public_pipelines.TWINS.get(name, settings)) == set()


@pytest.mark.parametrize("name", TUTORIALS)
def test_nothing_is_found_in_a_tutorial(name):
    assert found(TUTORIALS[name](), **public_pipelines.FITS.get(name, {})) == set()


def test_what_tensorflow_is_expected_to_fix_it_fixes():
    """A rule assumes it; here its own optimizer is asked which transformation follows."""
    from tensorflow.python.data.experimental.ops import testing

    def runs_as(names, function):
        next(iter(numbers().apply(testing.assert_next(names)).map(function)))

    runs_as(["ParallelMapV2"], decode)
    runs_as(["Map"], noisy)


FILES = str(Path(__file__).parent / "*.py")  # for a pipeline that is not run
IMAGES = Dataset.from_tensor_slices(np.zeros((320, 8, 8, 3), "uint8"))

#: Correct pipelines, besides those of tutorials.
GUIDES = [
    # Windows made with `batch`.
    lambda: numbers().batch(20, drop_remainder=True).batch(2).prefetch(1),
    lambda: numbers().batch(20).shuffle(10).batch(2).prefetch(1),
    lambda: numbers().batch(7).map(lambda n: (n[:-1], n[1:]), AUTOTUNE).padded_batch(2),
    lambda: numbers().batch(7).unbatch().batch(20),
    lambda: PAIRS.batch(8).map(lambda x, y: (x, y[-1:]), AUTOTUNE).batch(4).prefetch(1),
    # Texts of sentences, and lengths in groups.
    lambda: numbers().map(tf.range, AUTOTUNE).ragged_batch(4).batch(5).prefetch(1),
    lambda: (
        numbers()
        .map(tf.range, AUTOTUNE)
        .bucket_by_sequence_length(tf.size, [100], [20, 10])
        .prefetch(1)
    ),
    lambda: (
        numbers()
        .group_by_window(lambda n: n % 2, lambda _, group: group.batch(4), window_size=4)
        .unbatch()
        .batch(20)
    ),
]
ENDLESS = lambda: numbers().shuffle(200).batch(20).repeat().prefetch(1)  # noqa: E731
THRICE = lambda: numbers().shuffle(200).batch(20).repeat(3).prefetch(1)  # noqa: E731
FIXED = lambda: numbers().shuffle(200).batch(30).cache().prefetch(1)  # noqa: E731
#: All that is found of pipelines; of some faults what else they have is no matter.
CASES = [
    *((make, {}, set()) for make in GUIDES),
    # What runs once.
    (lambda: numbers().batch(20).map(by_python, AUTOTUNE).cache().prefetch(1), {}, set()),
    # Batches by length are copies, as others are.
    (
        lambda: (
            generator()
            .map(tf.range, AUTOTUNE)
            .cache()
            .bucket_by_sequence_length(tf.size, [100], [20, 10])
            .prefetch(1)
        ),
        {"replicas": 2},
        set(),
    ),
    # A split of examples in a fixed order is right.
    *(
        (lambda make=make: make(numbers()).skip(80).batch(20), {"training": False}, set())
        for make in (
            lambda data: data.shuffle(200, seed=1, reshuffle_each_iteration=False),
            lambda data: data.shuffle(200, seed=1).cache(),
            lambda data: data,
        )
    ),
    # Batches of windows with labels.
    *(
        (make, {}, {("batched-twice", "note")})
        for make in (
            lambda: PAIRS.batch(8, drop_remainder=True).batch(4),
            lambda: PAIRS.batch(8).padded_batch(4),
        )
    ),
    # Held out may be other files.
    (
        lambda: numbers().shuffle(200).take(80).batch(20).prefetch(1),
        {},
        {("split-after-shuffle", "note")},
    ),
    # Epochs and lengths.
    (ENDLESS, {"epochs": 3}, {("repeat", "wrong")}),
    (ENDLESS, {"epochs": 3, "steps_per_epoch": 10}, set()),
    (THRICE, {}, {("repeat", "note")}),
    (THRICE, {"epochs": 1}, set()),
    (THRICE, {"epochs": 4}, {("repeat", "wrong")}),
    # 10 batches: Keras ends an epoch within which they run out, and begins again with the next.
    (lambda: numbers().batch(20), {"epochs": 2, "steps_per_epoch": 4}, set()),
    (lambda: numbers().batch(20), {"epochs": 3, "steps_per_epoch": 4}, {("runs-out", "wrong")}),
    (lambda: numbers(210).batch(20).prefetch(1), {"replicas": 4}, {("short-batch", "note")}),
    (lambda: numbers(201).batch(20, drop_remainder=True).prefetch(1), {"replicas": 4}, set()),
    # A buffer relative to the data.
    (lambda: numbers(60_000).shuffle(100).batch(20), {}, {("small-shuffle", "note")}),
    (lambda: numbers(60_000).shuffle(1024).batch(64, drop_remainder=True), {}, set()),
    (
        lambda: numbers().filter(lambda n: n > 3).shuffle(-2).batch(64).prefetch(1),  # all of it
        {},
        set(),
    ),
    # Validation data need no new order.
    (FIXED, {}, {("shuffle-before-cache", "wrong")}),
    (FIXED, {"training": False}, set()),
]


@pytest.mark.parametrize(("make", "settings", "expected"), CASES)
def test_all_that_is_found_is(make, settings, expected):
    assert found(make(), **settings) == expected


def test_a_finding_counts_what_it_is_about_and_names_the_stage_as_it_was_written():
    (finding,) = lint(THRICE())
    assert (finding.rule, finding.where) == ("repeat", "repeat(3), stage 4 of 5")
    assert "3 * 4 times" in lint(THRICE(), epochs=4)[0].problem
    assert "1 of 20 examples" in lint(numbers(201).batch(20).prefetch(1))[0].problem
    (finding,) = lint(numbers().map(noisy).batch(20).prefetch(AUTOTUNE))
    line = noisy.__code__.co_firstlineno
    assert finding.where == f"map(noisy), stage 2 of 4, line {line} of test_lint.py"


@pytest.mark.parametrize(("cache", "remainder"), [(True, "pad"), (False, "keep")])
def test_our_own_pipelines_are_clean(cache, remainder):
    x, y = np.zeros((64, 8), "float32"), np.zeros(64, "int32")
    config = pipelines.PipelineConfig(cache=cache, remainder=remainder)
    examples = Dataset.from_tensor_slices((x, y))
    settings = {
        "global_batch_size": 16,
        "replicas": 2,
        "keep": lambda _, y: y < 1,
        "prepare": lambda x, y: (tf.image.adjust_contrast(x[None, :, None], 2.0), y),
    }
    train = pipelines.train_pipeline(examples, config, augment=lambda batch, _: batch, **settings)
    assert found(train, replicas=2) == set()
    held_out = pipelines.eval_pipeline(examples, config, remainder=remainder, **settings)
    notes = {("padded-metrics", "note")} if remainder == "pad" else set()
    assert found(held_out, training=False, replicas=2) == notes


def test_what_a_train_pipeline_is_given_is_looked_at(tmp_path):
    sizes = {"global_batch_size": 20, "replicas": 2}
    uncached = pipelines.PipelineConfig(cache=False)
    prepared = pipelines.train_pipeline(numbers(), uncached, prepare=by_python, **sizes)
    assert faults(prepared) == {"python"}
    tracked = callbacks.Resume(tmp_path / "states").track(prepared)
    assert faults(tracked) == {"python"}
    drawn = pipelines.train_pipeline(numbers(), prepare=noisy, **sizes)
    assert faults(drawn) == {"random-before-cache"}
    assert faults(drawn.map(tf.sort, AUTOTUNE).prefetch(1)) == {"random-before-cache"}


@pytest.mark.parametrize("build", [pipelines.train_pipeline, pipelines.eval_pipeline])
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PAIRS.batch(4), r"`batch\(4\)` makes batches.*unbatch"),
        (lambda: PAIRS.shuffle(9).padded_batch(4).prefetch(2), "makes batches"),
        (lambda: generator().batch(7), "makes batches"),
        (lambda: Dataset.from_tensors(next(iter(PAIRS.batch(64)))), "from_tensor_slices"),
        (lambda: Dataset.list_files(FILES), "names of files"),
    ],
)
def test_a_source_that_has_no_single_examples_raises(build, make, sentence):
    with pytest.raises(ValueError, match=f"`source` must have single examples.*{sentence}"):
        build(make(), global_batch_size=8)


@pytest.mark.parametrize("build", [pipelines.train_pipeline, pipelines.eval_pipeline])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: IMAGES, {}),
        (lambda: numbers().batch(20), {}),
        (lambda: numbers().batch(7, drop_remainder=True), {}),
        (lambda: PAIRS.batch(8).map(lambda x, y: (x, y)), {}),
        (lambda: PAIRS.batch(7).unbatch(), {}),
        (lambda: Dataset.list_files(FILES), {"prepare": tf.io.read_file}),
        (lambda: Dataset.from_tensor_slices(["a sentence " * 50] * 8), {}),  # no name of a file
        (lambda: numbers().concatenate(numbers().take(5).repeat(4)), {}),  # a rare class, say
        (lambda: numbers().repeat().take(30), {}),
    ],
)
def test_a_source_of_windows_texts_or_a_repeated_part_is_taken(build, make, settings):
    next(iter(build(make(), global_batch_size=2, **settings)))


def test_looking_costs_no_element():
    taken = []
    spec = tf.TensorSpec([], tf.int64)
    source = Dataset.from_generator(lambda: map(taken.append, range(3)), output_signature=spec)
    lint(source.shuffle(2).cache().batch(2))
    assert taken == []


def test_looking_leaves_everything_as_it_was(tmp_path):
    shuffled = ordered().shuffle(100, seed=4)
    train = pipelines.train_pipeline(ordered(), global_batch_size=40)
    expected = [*ordered().shuffle(100, seed=4).as_numpy_iterator()]
    noisy_batches = shuffled.map(noise).batch(40)
    np.random.seed(1)
    lint(noisy_batches)
    lint(ordered().cache(str(tmp_path / "cache")).batch(40))
    lint(train)
    assert np.random.rand() == np.random.RandomState(1).rand()
    for element, other in zip(expected, shuffled, strict=True):
        np.testing.assert_array_equal(element[0], other[0])
    assert not [*tmp_path.iterdir()]
    assert train.epoch_counter.position() == (0, 0)


class Once:
    def __init__(self):
        self.noise = [0.5]

    def __call__(self, x, y):
        return x * self.noise.pop(), y


def test_users_functions_are_not_called_again():
    rng, scale = np.random.default_rng(3), {"x": 2.0}
    drawn = mixed().map(lambda x, y: (x + rng.normal(), y), AUTOTUNE).batch(40)
    state = rng.bit_generator.state
    assert found(drawn) == {("constant-random", "wrong")}
    assert rng.bit_generator.state == state
    changed = mixed().map(Once(), AUTOTUNE).map(lambda x, y: (x * scale["x"], y), AUTOTUNE)
    scale["x"] = 3.0
    assert found(changed.batch(40)) == set()


def test_random_numbers_are_found_however_they_are_named():
    def imported(x, y):
        import random as chance

        return x * chance.random(), y

    def inside(x, y):
        return tf.cond(y > 0, lambda: x * np.random.uniform(), lambda: x), y

    draws = np.random.RandomState(1)
    partial = functools.partial(lambda low, x, y: (x + draws.uniform(low), y), 0.5)
    for function in (imported, inside, partial, tf.function(inside)):
        assert found(mixed().map(function, AUTOTUNE).batch(40)) == {("constant-random", "wrong")}

    def stateless(x, random):  # a name like that of a module
        return x + tf.random.stateless_uniform([8], [1, 2]), random

    def by_library(x, y):
        keras.utils.set_random_seed(1)  # which names generators
        return x, y

    for function in (stateless, by_library):
        assert found(mixed().map(function, AUTOTUNE).batch(40)) == set()


def test_large_arrays_are_not_copied_to_learn_an_order():
    for count, expected in ((100, {"shuffle-before-shard"}), (1_000_000, set())):
        values = slices(np.zeros(count, "int8"))
        mixed_by_threads = values.interleave(
            Dataset.from_tensors, num_parallel_calls=2, deterministic=False
        )
        assert faults(mixed_by_threads.shard(2, 0).batch(50)) == expected


def test_labels_are_not_waited_for():
    never = numbers().repeat().filter(lambda n: n < 0).map(lambda n: (n, n), AUTOTUNE)
    lint(never.batch(8))
    many = numbers(10**12).map(lambda n: (n, n // 10**12), AUTOTUNE)
    lint(many.batch(8))


@pytest.mark.parametrize(("shift", "level"), [(1, "wrong"), (None, "note")])
def test_groups_of_examples_may_be_shuffled_before_and_sequences_not(shift, level):
    windows = numbers().shuffle(200).window(5, shift, drop_remainder=True)
    grouped = windows.flat_map(lambda window: window.batch(5)).batch(8, drop_remainder=True)
    assert ("shuffle-before-window", level) in found(grouped)


def test_labels_that_cannot_be_read_are_not_known():
    missing = slices(np.array(["no file"] * 64), np.arange(64) // 32)
    assert found(missing.map(lambda x, y: (tf.io.read_file(x), y), AUTOTUNE).batch(8)) == set()
    assert found(mixed().map(noise, AUTOTUNE).batch(40)) == {("constant-random", "wrong")}


def test_bad_input_raises():
    for name, value in (("replicas", 0), ("epochs", 0), ("steps_per_epoch", 2.5)):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive integer"):
            lint(numbers(), **{name: value})
    with pytest.raises(ValueError, match="`dataset` must be a tf.data.Dataset"):
        lint(np.zeros(3))
