"""On both backends: tests/test_environments.py runs this file again on JAX."""

import json

import keras
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PolynomialDecay

from kdpkit import scaling, schedules
from tests import drawn_schedules

# TensorFlow rounds an element by its position in the vector.
ULPS = 5e-7

quick = settings(max_examples=30)
unshrunk = settings(phases=[Phase.generate], max_examples=200)

CLASSES = [
    value
    for name, value in vars(schedules).items()
    if isinstance(value, type) and value.__module__ == "kdpkit.schedules" and name[0] != "_"
]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_laws_below_are_tried_with_every_schedule(kind):
    try:
        find(drawn_schedules.schedules(), lambda drawn: type(drawn) is kind, settings=unshrunk)
    except NoSuchExample:
        pytest.fail(f"Add {kind.__name__} to `schedules` in tests/drawn_schedules.py.")


@quick
@given(drawn_schedules.schedules(), st.floats(0.25, 8), st.sampled_from(scaling.RULES))
def test_a_scaled_schedule_is_a_multiple(schedule, factor, rule):
    power = {"none": 0, "sqrt": 1 / 2, "linear": 1}[rule]
    scaled = schedules.ScaledSchedule(schedule, factor, rule)
    expected = factor**power * schedules.preview(schedule, 60)
    np.testing.assert_allclose(schedules.preview(scaled, 60), expected, rtol=ULPS)


@quick
@given(
    st.lists(drawn_schedules.schedules() | drawn_schedules.RATES, min_size=1, max_size=3),
    st.lists(st.integers(1, 20), min_size=2, max_size=2),
)
def test_each_of_joined_schedules_starts_at_its_step_0(parts, lengths):
    lengths = [*lengths[: len(parts) - 1], 30]
    joined = schedules.JoinedSchedule(parts, np.cumsum(lengths[:-1]).tolist())
    pieces = [schedules.preview(of, 30)[:length] for of, length in zip(parts, lengths, strict=True)]
    rates = schedules.preview(joined, 70)[: sum(lengths)]  # of one shape: JAX compiles each anew
    np.testing.assert_allclose(rates, np.concatenate(pieces), rtol=ULPS)


@pytest.mark.parametrize("kind", [int, np.uint8, float, keras.ops.convert_to_tensor])
def test_a_step_of_any_kind_gives_one_float32_rate(kind):
    rate = keras.ops.convert_to_numpy(nested()(kind(7)))
    assert (rate.dtype, rate.shape) == ("float32", ())
    np.testing.assert_allclose(rate, schedules.preview(nested(), 8)[7], rtol=ULPS)


@quick
@given(drawn_schedules.schedules())
def test_a_schedule_survives_json(schedule):
    written = json.dumps(keras.optimizers.schedules.serialize(schedule))
    restored = keras.optimizers.schedules.deserialize(json.loads(written))
    assert type(restored) is type(schedule)
    assert restored.get_config() == schedule.get_config()
    np.testing.assert_array_equal(schedules.preview(restored, 60), schedules.preview(schedule, 60))


@quick
@given(drawn_schedules.schedules(), st.integers(1, 20), drawn_schedules.RATES)
def test_warmup_meets_the_schedule_exactly_at_its_first_rate(schedule, warmup_steps, initial):
    warmup = schedules.LinearWarmup(schedule, warmup_steps, initial)
    assert float(warmup(0)) == np.float32(initial)
    assert float(warmup(warmup_steps)) == float(schedule(0))
    rates, plain = schedules.preview(warmup, 60), schedules.preview(schedule, 60)
    np.testing.assert_allclose(rates[warmup_steps:], plain[: 60 - warmup_steps], rtol=ULPS)
    rise = (plain[0] - initial) / warmup_steps
    np.testing.assert_allclose(np.diff(rates[: warmup_steps + 1]), rise, rtol=1e-3, atol=1e-6)


def test_composed_decays_by_hand():
    square = schedules.warmup_polynomial(1.0, total_steps=6, warmup_steps=2, power=2.0)
    expected = [0, 0.5, 1, 0.5625, 0.25, 0.0625, 0]
    np.testing.assert_allclose(schedules.preview(square, 7), expected)
    cosine = schedules.warmup_cosine(2.0, total_steps=6, warmup_steps=2, end_learning_rate=1.0)
    expected = [0, 1, 2, 1.5 + 0.125**0.5, 1.5, 1.5 - 0.125**0.5, 1, 1]
    np.testing.assert_allclose(schedules.preview(cosine, 8), expected, rtol=1e-6)
    assert schedules.preview(schedules.warmup_cosine(2.0, total_steps=6), 1) == 2.0


@quick
@given(drawn_schedules.schedules(), st.integers(2**24, 2**31 - 200))
def test_counting_stays_exact_where_float32_cannot_represent_every_step(schedule, boundary):
    far = schedules.JoinedSchedule([7.0, schedule], [boundary])
    rates = schedules.preview(far, range(boundary - 3, boundary + 60))
    assert np.all(rates[:3] == 7.0)
    np.testing.assert_allclose(rates[3:], schedules.preview(schedule, 60), rtol=ULPS)


def test_previewing_takes_schedules_that_handle_one_step_at_a_time():
    class Sum(LearningRateSchedule):
        def __call__(self, step):
            step = keras.ops.cast(step, "float32")
            return keras.ops.sum(keras.ops.array([1.0, 2.0, 3.0]) * step)

    condition = CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=2)
    np.testing.assert_allclose(schedules.preview(condition, 4)[:3], [0, 0.5, 1])
    np.testing.assert_array_equal(schedules.preview(Sum(), 3), [0, 6, 12])
    warmed = schedules.LinearWarmup(condition, 2, initial_learning_rate=1.0)
    np.testing.assert_allclose(schedules.preview(warmed, 5), [1, 0.5, 0, 0.5, 1])


def test_a_plot_holds_the_rates():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="plots need matplotlib")
    axes = schedules.plot(schedules.warmup_polynomial(1.0, total_steps=4), 5)
    assert schedules.plot(0.5, [2, 4, 8], axes=axes) is axes
    np.testing.assert_allclose(axes.lines[0].get_xydata()[:, 1], [1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_array_equal(axes.lines[1].get_xydata()[:, 0], [2, 4, 8])
    pyplot.close(axes.figure)


@keras.saving.register_keras_serializable(package="kdpkit-tests")
def first_moment(_, predictions):
    return keras.ops.mean(predictions, axis=-1)


def train(model, steps):
    ones = np.ones((steps, 1), "float32")
    model.fit(ones, ones, batch_size=1, shuffle=False, verbose=0)


def nested():
    decay = schedules.warmup_cosine(0.5, total_steps=9, warmup_steps=2)
    later = schedules.LinearWarmup(schedules.ScaledSchedule(decay, 4, rule="sqrt"), 3, 0.25)
    return schedules.JoinedSchedule([schedules.LinearWarmup(0.5, 4), later, 0.125], [5, 14])


def test_fit_applies_the_rates_and_a_saved_model_goes_on_with_them(tmp_path):
    # The gradient of its one weight is always 1, so that SGD sums the rates.
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), weight])
    model.compile(keras.optimizers.SGD(nested()), loss=first_moment)
    train(model, 9)
    expected = schedules.preview(nested(), 20)
    np.testing.assert_allclose(model.get_weights()[0].item(), -expected[:9].sum(), rtol=1e-5)
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    train(restored, 11)
    np.testing.assert_allclose(restored.get_weights()[0].item(), -expected.sum(), rtol=1e-5)


decay = PolynomialDecay(1.0, 10)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: schedules.LinearWarmup(decay, 0), "`warmup_steps`.*=0"),
        (lambda: schedules.LinearWarmup(lambda _: 0.1, 2), "`schedule` must be a keras.*number"),
        (lambda: schedules.ScaledSchedule(decay, 0), "`factor`.*=0"),
        (lambda: schedules.JoinedSchedule([], []), "one boundary between.*schedules=0"),
        (lambda: schedules.JoinedSchedule([1.0, 2.0, 3.0], [4, 4]), "must increase.*4, 4"),
        (lambda: schedules.warmup_cosine(0.0, total_steps=4), "`peak` must be above 0"),
        (
            lambda: schedules.warmup_polynomial(1.0, total_steps=4, warmup_steps=4),
            "no step.*total_steps=4, warmup_steps=4",
        ),
        (lambda: schedules.preview(decay, [1, -1]), "`steps`.*-1"),
    ],
)
def test_bad_arguments_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("total_steps", lambda steps: schedules.warmup_polynomial(1.0, total_steps=steps)),
        (
            "total_steps",
            lambda steps: schedules.warmup_cosine(1.0, total_steps=steps, warmup_steps=5),
        ),
        ("warmup_steps", lambda steps: schedules.LinearWarmup(1.0, steps)),
        ("boundaries", lambda steps: schedules.JoinedSchedule([1.0, 0.5], [steps])),
        (
            "steps",
            lambda steps: schedules.preview(schedules.warmup_cosine(1.0, total_steps=9), [steps]),
        ),
        ("step", lambda steps: schedules.ScaledSchedule(1.0, 2)(np.int64(steps))),
    ],
)
def test_steps_work_up_to_the_most_that_an_optimizer_counts_and_raise_beyond(name, use):
    if keras.backend.backend() == "tensorflow":
        assert use(5 * 10**9) is not None
        with pytest.raises(ValueError, match=f"count 9,223,.*{name}.*{10**30}"):
            use(10**30) if name != "step" else schedules.preview(1.0, [10**30])
    else:
        assert use(2**31 - 1) is not None
        with pytest.raises(ValueError, match=f"count 2,147,483,647 steps.*{name}.*{5 * 10**9}"):
            use(5 * 10**9)
