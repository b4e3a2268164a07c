"""The gradient noise scale against closed forms and per-example gradients, on both backends.

tests/test_environments.py runs this file again on JAX, where a batch's parts are micro-batches.
"""

import itertools
import math
import re

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

import kdpkit
from kdpkit import batches, scaling, strategies, testing
from kdpkit.training import NoiseScale, TrainingLoop
from kdpkit.training._noise_scale import estimated
from kdpkit.training._noise_sums import NoiseSums

ON_JAX = keras.backend.backend() == "jax"
# Replicas and micro-batches; on JAX replicas have no gradients of their own.
CUTS = [(1, 2), (2, 2), (4, 3)] if ON_JAX else [(1, 2), (2, 1), (4, 1), (2, 3)]


def loop_on(replicas, build, loop=TrainingLoop, **settings):
    if ON_JAX:
        strategy = kdpkit.sharding.data_mesh(replicas)
        return loop(build(), strategy=strategy, **settings)
    kind = "one" if replicas == 1 else "mirrored"
    strategy = strategies.select_strategy(kind, devices=None if replicas == 1 else replicas)
    with strategy.scope():
        return loop(build(), strategy=strategy, **settings)


def data(*parts, size):
    """Return batches in the order of the examples; the last one may be smaller."""
    if ON_JAX:
        arrays = parts if len(parts) > 1 else parts[0]
        return batches.ArrayBatches(arrays, global_batch_size=size, remainder="keep")
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]).batch(size)


# A problem whose gradients are known: the loss |w - x|^2 / 2 has the gradient w - x.

MEAN = np.array([0.6, -0.3, 1.2, 0.0, 0.9], "float32")
DEVIATION = np.array([1.0, 3.0, 0.5, 2.0, 1.0], "float32")
NOISE_SCALE = float((DEVIATION**2).sum() / (MEAN**2).sum())  # where w stays 0: 5.6 examples


class Weight(layers.Layer):
    """Returns its weight, which begins with 0, for every example."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return ops.zeros_like(x) + self.w


class Quadratic(TrainingLoop):
    def per_example_loss(self, x, y, *, training):  # noqa: ARG002 a method's arguments
        predictions = self.model(x, training=training)
        return ops.sum((predictions - x) ** 2, axis=-1) / 2, predictions


def quadratic(replicas, accumulation, rate=0.0, **settings):
    return loop_on(
        replicas,
        lambda: keras.Sequential([keras.Input((len(MEAN),)), Weight()]),
        Quadratic,
        optimizer=keras.optimizers.SGD(rate),
        loss=None,
        accumulation=accumulation,
        noise_scale=True,
        **settings,
    )


def drawn(num_examples, seed=0):
    random = np.random.default_rng(seed)
    return (MEAN + DEVIATION * random.normal(size=(num_examples, len(MEAN)))).astype("float32")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("replicas", "accumulation"), CUTS)
def test_the_closed_form_of_a_quadratic_lies_within_the_interval(replicas, accumulation):
    loop = quadratic(replicas, accumulation, steps_per_loop=16)
    history = loop.fit(data(drawn(250 * 30 + 7), size=30), epochs=1, verbose=0).history
    scale = loop.noise_scale
    assert scale.low < NOISE_SCALE < scale.high < 1.5 * scale.low
    assert scale.low < scale.estimate < scale.high
    assert scale.steps == 251
    assert scale.global_batch_size == pytest.approx(7507 / 251)
    assert history["noise_scale"] == [scale.estimate]


class Intervals(keras.callbacks.Callback):
    """Notes the noise scale of every epoch."""

    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 Keras' arguments
        self.seen.append(self.loop.noise_scale)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_of_many_intervals_of_a_loop_19_in_20_hold_the_truth():
    loop = quadratic(1 if ON_JAX else 2, 2 if ON_JAX else 1, steps_per_loop=50)
    intervals = Intervals(loop)
    runs, steps, size = 300, 50, 9  # cut into 5 and 4
    examples = data(drawn(runs * steps * size), size=size)
    loop.fit(examples, epochs=runs, steps_per_epoch=steps, callbacks=[intervals], verbose=0)
    held = sum(scale.low <= NOISE_SCALE <= scale.high for scale in intervals.seen)
    # Of 300 intervals 285 are expected, with a standard deviation of sqrt(300 * 0.95 * 0.05) = 3.8.
    assert abs(held - 285) <= 3 * 3.8
    assert sum(math.isfinite(scale.high) for scale in intervals.seen) > 0.9 * runs


def groups_of(gradient, noise, num_examples):
    """Deal steps out to 64 groups."""
    sums = np.zeros((64, 4))
    of_steps = np.stack(
        [np.ones(len(num_examples)), num_examples, num_examples * gradient, num_examples * noise],
        axis=1,
    )
    np.add.at(sums, np.arange(len(num_examples)) % 64, of_steps)
    return sums


@pytest.mark.parametrize("steps", [3, 10, 64, 500])
@pytest.mark.parametrize("times_the_batch", [0.1, 3.0, 100.0])
def test_intervals_hold_the_truth_where_the_gradient_hardly_stands_out(steps, times_the_batch):
    random = np.random.default_rng(steps)
    parts, width, num_examples = 4, 50, np.full(steps, 32.0)
    noise = times_the_batch * 32 * np.ones(steps)  # over |G|^2 = 1
    trials, held = 1000, 0
    for _ in range(trials):
        # In directions of equal noise, the mean of a batch and what its parts differ by.
        off = random.normal(size=(steps, width)) * np.sqrt(noise / num_examples / width)[:, None]
        off[:, 0] += 1
        freedom = width * (parts - 1)
        between = noise * random.chisquare(freedom, steps) / freedom
        squared = (off**2).sum(axis=1) - between / num_examples
        found = estimated(groups_of(squared, between, num_examples), batches_in_an_update=1)
        held += found.low <= times_the_batch * 32 <= found.high
    # 950 are expected, with a standard deviation of sqrt(1000 * 0.95 * 0.05) = 6.9. Where the
    # gradient is lost in the noise, more: there the interval has one end, and 97.5 % lie above it.
    assert held >= 950 - 3 * 6.9
    assert held <= (975 if times_the_batch > 1 else 950) + 3 * 6.9


# The estimates of a step, against examples taken one by one.


def oracle(gradients, sizes):
    """Return |G|^2 and tr(S) from the gradients of examples, for parts of any sizes."""
    parts = np.split(np.asarray(gradients, np.float64), np.cumsum(sizes)[:-1])
    mean = np.concatenate(parts).mean(axis=0)
    between = sum(len(part) * ((part.mean(axis=0) - mean) ** 2).sum() for part in parts)
    noise = between / (len(parts) - 1)
    return (mean**2).sum() - noise / len(gradients), noise


def of_step(gradients, sizes):
    """Return the same from what a step adds up: squared norms of parts that add up to the mean."""
    parts = np.split(np.asarray(gradients, np.float64), np.cumsum(sizes)[:-1])
    sums = NoiseSums()
    num_examples = len(gradients)
    sums.add(
        parts=len(sizes),
        num_examples=num_examples,
        of_parts=sum(
            num_examples / len(p) * ((p.sum(axis=0) / num_examples) ** 2).sum() for p in parts
        ),
        of_whole=((sum(p.sum(axis=0) for p in parts) / num_examples) ** 2).sum(),
    )
    *_, (steps, counted, gradient, noise) = ops.convert_to_numpy(sums.variables[0])
    assert (steps, counted) == (1, num_examples)
    return gradient / num_examples, noise / num_examples


sizes_of_parts = st.lists(st.integers(1, 6), min_size=2, max_size=5)


@given(sizes_of_parts, st.integers(0, 99), st.floats(0.1, 10))
def test_a_step_estimates_the_noise_of_its_examples_gradients_for_any_parts(sizes, seed, spread):
    random = np.random.default_rng(seed)
    gradients = 1 + spread * random.normal(size=(sum(sizes), 3))
    of_whole = (gradients.mean(axis=0) ** 2).sum()
    tolerance = 1e-5 * (of_whole + spread**2)
    ours, theirs = of_step(gradients, sizes), oracle(gradients, sizes)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=tolerance)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5, abs=tolerance * sum(sizes))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (1, 4), (2, 1, 1), (1, 1, 2, 1)])
def test_over_all_ways_to_deal_examples_to_parts_the_mean_is_that_of_the_examples(sizes):
    gradients = 1 + np.random.default_rng(1).normal(size=(sum(sizes), 3))
    dealt = [oracle(gradients[list(o)], sizes) for o in itertools.permutations(range(sum(sizes)))]
    noise = gradients.var(axis=0, ddof=1).sum()
    expected = (gradients.mean(axis=0) ** 2).sum() - noise / len(gradients), noise
    np.testing.assert_allclose(np.mean(dealt, axis=0), expected)


def test_even_parts_give_the_formulas_of_the_paper():
    gradients = 1 + np.random.default_rng(2).normal(size=(12, 3))
    big, small = 12, 4
    of_big = (gradients.mean(axis=0) ** 2).sum()
    of_small = (gradients.reshape(3, small, 3).mean(axis=1) ** 2).sum(axis=1).mean()
    gradient = (big * of_big - small * of_small) / (big - small)
    noise = (of_small - of_big) / (1 / small - 1 / big)
    assert of_step(gradients, (4, 4, 4)) == pytest.approx((gradient, noise), rel=1e-5)


def test_a_step_worked_by_hand():
    # Gradients 1 | 2 4 | 8 9 of 1, 2 and 2 examples: means 1, 3, 8.5 and 4.8. Between the parts
    # there is (14.44 + 2 * 3.24 + 2 * 13.69) / 2 = 24.15, and 4.8^2 - 24.15 / 5 = 18.21.
    assert of_step([[1], [2], [4], [8], [9]], (1, 2, 2)) == pytest.approx((18.21, 24.15))


# The loop against the gradients of its examples.


def embedded(**embedding):
    """A model whose gradients are sparse on TensorFlow, with a regularizer."""

    def build():
        initializer = keras.initializers.RandomNormal(seed=1)
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(4, 2, embeddings_initializer=initializer, **embedding),
                layers.Dense(3, kernel_initializer=initializer, kernel_regularizer="l2"),
            ]
        )

    return build


def parts_of(num_examples, replicas, accumulation):
    """Return the sizes of the parts that have examples, and the order of the examples."""
    if ON_JAX:
        count = min(accumulation, num_examples)
        parts = [[*range(i, num_examples, count)] for i in range(count)]
        return [*map(len, parts)], [*itertools.chain(*parts)]
    sizes = []
    for size in scaling.split_batch(num_examples, replicas):
        count = min(accumulation, size)
        sizes += [size * (i + 1) // count - size * i // count for i in range(count)]
    return sizes, [*range(num_examples)]


def gradients_of_examples(loop, x, y, weights, *, divisor=None):
    """Return the gradient of each example alone, weighed as in the mean, regularized."""
    model, num_examples = loop.model, len(x)

    def loss(x, y, weight):
        losses, predictions = loop.per_example_loss(x, y, training=False)
        (term,) = loop.loss.terms(losses, predictions, weight)
        return term.total * (
            num_examples / divisor if divisor else 1 / term.per_example_count
        ) + sum(model.losses)

    singles = [tuple(part[i : i + 1] for part in (x, y, weights)) for i in range(num_examples)]
    if ON_JAX:
        import jax

        def of(values, single):
            pairs = zip(model.trainable_variables, values, strict=True)
            with keras.StatelessScope(state_mapping=[*pairs], collect_losses=True):
                return loss(*single)

        values = [v.value for v in model.trainable_variables]
        found = [jax.grad(of)(values, single) for single in singles]
    else:
        import tensorflow as tf

        found = []
        for single in singles:
            with tf.GradientTape() as tape:
                value = loss(*map(tf.constant, single))
            gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
            found.append([*map(tf.convert_to_tensor, gradients)])
    return [np.concatenate([np.ravel(part) for part in of_example]) for of_example in found]


CASES = {
    "sparse": ({}, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "masked": ({"mask_zero": True}, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "weighted": (
        {},
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "accumulation"), [CUTS[0], CUTS[-1]])
@pytest.mark.parametrize("case", [*CASES])
def test_a_loop_estimates_the_noise_of_its_examples_gradients(case, replicas, accumulation):
    embedding, loss = CASES[case]
    loop = loop_on(
        replicas,
        embedded(**embedding),
        optimizer=keras.optimizers.SGD(0.0),
        loss=loss,
        accumulation=accumulation,
        noise_scale=True,
    )

    @settings(max_examples=6 if ON_JAX else 15)
    @given(st.integers(2, 9), st.integers(0, 99))
    def holds(num_examples, seed):
        random = np.random.default_rng(seed)
        x, y = random.integers(0, 4, (num_examples, 3)), random.integers(0, 3, (num_examples, 3))
        x[:, 0] = np.maximum(x[:, 0], 1)  # an example with nothing unmasked has no loss
        x, y = x.astype("int32"), y.astype("int32")
        weights = (1 + random.integers(0, 3, num_examples)).astype("float32")
        divisor = {
            "sparse": None,
            "masked": 3 * num_examples * (x > 0).mean(),
            "weighted": weights.sum(),
        }[case]
        loop.fit(data(x, y, weights, size=num_examples), epochs=1, verbose=0)
        sizes, order = parts_of(num_examples, replicas, accumulation)
        gradients = np.array(gradients_of_examples(loop, x, y, weights, divisor=divisor))[order]
        gradient, noise = oracle(gradients, sizes) if len(sizes) > 1 else (0.0, 0.0)
        *_, last = sums_of(loop)
        counts = int(len(sizes) > 1)
        size = float((gradients**2).sum(axis=1).max())
        assert last[:2] == pytest.approx((counts, num_examples * counts))
        assert last[2:] / num_examples == pytest.approx(
            (gradient, noise), rel=1e-4, abs=1e-5 * size
        )

    holds()


def classifier_loop(replicas, accumulation, build=testing.tiny_classifier, **settings):
    settings = {"optimizer": keras.optimizers.SGD(0.0), "noise_scale": True} | settings
    return loop_on(
        replicas,
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        accumulation=accumulation,
        **settings,
    )


def half_classifier():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return testing.tiny_classifier()
    finally:
        keras.config.set_dtype_policy("float32")


def sums_of(loop):
    return ops.convert_to_numpy(loop.noise_sums.variables[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"optimizer": keras.optimizers.SGD(0.0, loss_scale_factor=1024.0)}, 1e-5),
        ({"build": half_classifier}, 1e-2),
    ],
)
def test_the_scale_of_a_loss_is_no_part_of_its_gradient(settings, tolerance):
    loop, plain = classifier_loop(*CUTS[1], **settings), classifier_loop(*CUTS[1])
    for each in (loop, plain):
        each.fit(data(*testing.toy_classification(16), size=8), epochs=1, verbose=0)
    np.testing.assert_allclose(sums_of(loop), sums_of(plain), rtol=tolerance, atol=tolerance)


# What it leaves as it was.


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "accumulation"), CUTS)
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_weights_are_those_of_training_without_it(replicas, accumulation, jit):
    examples = data(*testing.toy_classification(23), size=10)
    weights = []
    for noise_scale in (False, True):
        loop = classifier_loop(
            replicas,
            accumulation,
            optimizer="adam",
            noise_scale=noise_scale,
            steps_per_loop=2,
            jit=jit if not ON_JAX else None,
        )
        history = loop.fit(examples, examples, epochs=3, verbose=0).history
        assert ("noise_scale" in history, "val_noise_scale" in history) == (noise_scale, False)
        weights.append(loop.model.get_weights())
    for plain, noted in zip(*weights, strict=True):
        if ON_JAX:  # XLA may compile the same operations to other programs
            np.testing.assert_allclose(noted, plain, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(noted, plain)


@pytest.mark.slow
def test_steps_in_a_call_validation_and_evaluation_do_not_change_it():
    examples, found = data(*testing.toy_classification(40), size=8), []
    for steps in (1, 4):
        loop = classifier_loop(*CUTS[1], optimizer="sgd", steps_per_loop=steps)
        validation = examples if steps == 1 else None
        history = loop.fit(examples, validation, epochs=2, verbose=0).history
        found.append((history["noise_scale"], loop.noise_scale))
        loop.evaluate(examples, verbose=0)
        assert loop.noise_scale == found[-1][1]
    assert found[0] == found[1]
    assert found[0][1].steps == 5  # of the last epoch alone


# What it leaves out, and what raises.


@pytest.mark.parametrize(("replicas", "accumulation"), CUTS[1:])
def test_steps_with_examples_in_one_part_are_left_out(replicas, accumulation):
    loop = quadratic(replicas, accumulation)
    examples = drawn(13)
    loop.fit(data(examples, size=6), epochs=1, verbose=0)
    assert loop.noise_scale.steps == 2  # not the last example
    assert loop.noise_scale.global_batch_size == 6
    scale = loop.noise_scale
    loop.fit(data(examples[:12], size=6), epochs=1, verbose=0)
    assert loop.noise_scale.estimate == pytest.approx(scale.estimate, rel=1e-5)
    loop.fit(data(examples, size=1), epochs=1, verbose=0)
    assert math.isnan(loop.noise_scale.estimate)
    assert str(loop.noise_scale).startswith("There is no noise scale")


def test_a_step_that_overflows_is_left_out():
    x = drawn(16)
    x[3] = 1e38
    loop = quadratic(*CUTS[1])
    loop.fit(data(x, size=8), epochs=1, verbose=0)
    assert loop.noise_scale.steps == 1
    assert np.isfinite(sums_of(loop)).all()


def test_an_update_from_several_batches_has_the_examples_of_all():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    loop = classifier_loop(*CUTS[1], optimizer=optimizer)
    loop.fit(data(*testing.toy_classification(16), size=8), epochs=1, verbose=0)
    assert loop.noise_scale.global_batch_size == 24


def test_without_the_option_or_before_training_there_is_none():
    assert classifier_loop(1, 1, noise_scale=False).noise_scale is None
    scale = quadratic(*CUTS[0]).noise_scale
    assert math.isnan(scale.estimate)
    assert (scale.steps, scale.low, scale.high) == (0, 0, math.inf)


@pytest.mark.parametrize("replicas", [1, 2] if ON_JAX else [1])
def test_a_batch_in_one_part_raises(replicas):
    with pytest.raises(ValueError, match=r"accumulation=1. Use `accumulation=2` or more"):
        classifier_loop(replicas, 1)


def test_what_is_neither_true_nor_false_raises():
    with pytest.raises(ValueError, match="`noise_scale` must be True or False.*noise_scale='yes'"):
        classifier_loop(1, 2, noise_scale="yes")


# Its sentences.


def scale_of(estimate, low, high, batch, steps=100):
    return NoiseScale(
        estimate=estimate, low=low, high=high, steps=steps, global_batch_size=float(batch)
    )


@pytest.mark.parametrize(
    ("scale", "parts"),
    [
        # (1 + 10) / (1 + 20) of the steps
        (
            scale_of(1280, 1100, 1500, 64),
            "still help.* 1/20 .* 1,280 .*1,100 to 1,500.* 52 %.*1.05",
        ),
        # (1 + 1/8) / (1 + 1/4) of the steps
        (scale_of(100, 80, 130, 400), "help little.* 4 times .* 90 % of the steps.* 1.80 times"),
        (scale_of(100, 80, 130, 100), "help somewhat.* about .* 75 % of the steps.* 1.50 times"),
        (scale_of(50, 10, 200, 40), "not clear yet.* 10 to 200.* 72 % of the steps.* 1.44 times"),
        (scale_of(math.inf, 1100, math.inf, 64), "still help.* 1,100 examples or more.*most 53 %"),
        (scale_of(40, 0, math.inf, 64, steps=1), "cannot be estimated from 1 step[.]"),
        (scale_of(math.nan, 0, math.inf, 64), "no noise scale from 100 steps.* zero"),
        (scale_of(0.0, 0.0, 0.0, 64), "help little.* above .* 100 % of the steps.* 2.00 times"),
    ],
)
def test_the_sentence_tells_whether_more_replicas_will_help(scale, parts):
    assert re.search(parts, str(scale), re.DOTALL)


def test_at_the_noise_scale_steps_and_examples_are_twice_the_fewest():
    scale = scale_of(100, 80, 130, 64)
    assert (scale.relative_steps(100), scale.relative_examples(100)) == (2, 2)
    assert (scale.relative_steps(25), scale.relative_rows(25)) == (5, 1.25)  # by its former name
    with pytest.raises(ValueError, match="`global_batch_size` must be above 0"):
        scale.relative_steps(0)


@pytest.mark.parametrize(
    ("groups", "low", "high"),
    [
        ([[1, 4, 4, 8]] * 2, 0, math.inf),  # two steps
        ([[1, 4, 4, 8]] * 5, 2, 2),  # all alike
        ([[1, 4, 4, 0]] * 5, 0, 0),  # no noise
        ([[1, 4, g, 8] for g in (4, -4, 1, -1)], None, math.inf),  # no gradient to be seen
        ([[1, 4, g, 8] for g in (-4, -5, -6)], None, math.inf),  # below zero by chance
        ([[1, 4, 4, s] for s in (9, 0, 0)], 0, None),  # hardly any noise to be seen
        ([[1, 4, 0, 0]] * 5, 0, math.inf),  # nothing at all
    ],
)
def test_intervals_at_their_limits(groups, low, high):
    scale = estimated(groups, batches_in_an_update=1)
    assert scale.low == pytest.approx(low) if low is not None else scale.low > 0
    assert scale.high == pytest.approx(high) if high is not None else 0 < scale.high < math.inf
