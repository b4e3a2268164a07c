"""Schedules read from text, drawn in characters, and their milestones."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)

from kdpkit import diagnostics, schedules
from kdpkit.diagnostics import _chart, _schedule_turns
from tests import generators

few = settings(max_examples=40)
AXIS = 11  # characters before the curve


def written(value):
    """Write a schedule as the call that makes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, LearningRateSchedule):
        return repr(value)
    settings = {name: getattr(value, name) for name in value.get_config()}
    arguments = ", ".join(f"{name}={written(setting)}" for name, setting in settings.items())
    return f"{type(value).__name__}({arguments})"


@few
@given(generators.learning_rate_schedules)
def test_a_schedule_is_read_as_it_was_written(schedule):
    read = diagnostics.read_schedule(written(schedule))
    assert type(read) is type(schedule)
    assert read.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", [0.5, 0.5, 0.5, 0.5]),
        ("PolynomialDecay(1.0, 2, 0.0)", [1, 0.5, 0, 0]),
        (" warmup_polynomial(1.0, total_steps=4, warmup_steps=2) ", [0, 0.5, 1, 0.5]),
        ("kdpkit.schedules.LinearWarmup(1, 2)", [0, 0.5, 1, 1]),
        ("keras.optimizers.schedules.PiecewiseConstantDecay((1,), [1., .5])", [1, 1, 0.5, 0.5]),
        ("schedules.JoinedSchedule([4.0, PolynomialDecay(+1.0, 2, 0.0)], [2])", [4, 4, 1, 0.5]),
    ],
)
def test_expressions_by_hand(text, expected):
    rates = schedules.preview(diagnostics.read_schedule(text), 4)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "`` is no schedule. Write a call such as"),
        ("CosineDecay(", "is no schedule"),
        ("x = 1", "is no schedule"),
        ("'0.1'", "is no schedule"),
        ("True", "is no schedule"),
        ("-0.1", "`schedule` must be at least 0"),
        ("1e999", "must be a finite number"),
        ("(" * 5000 + ")" * 5000, "is no schedule"),
        ("__import__('os').system('echo run')", r"no schedule `__import__\('os'\).system`"),
        ("os.system('echo run')", "There is no schedule `os.system`"),
        ("(lambda: 1)()", "There is no schedule"),
        ("preview(0.1, 5)", "There is no schedule `preview`"),
        ("LearningRateSchedule()", "There is no schedule `LearningRateSchedule`"),
        ("_Wrapper()", "There is no schedule `_Wrapper`"),
        ("CosinDecay(1e-3, 5)", "Do you mean `CosineDecay`?"),
        ("zzz(1)", "There are CosineDecay, CosineDecayRestarts, .*warmup_polynomial"),
        ("NoamDecay(512, steps)", "`steps` in `NoamDecay.512, steps.` is no number"),
        ("NoamDecay(512, [i for i in range(3)])", "is no number, string, list or call"),
        ("NoamDecay(512, 2 ** 9)", r"`2 \*\* 9` in .* is no number"),
        ("NoamDecay(*[1, 2])", "is no number, string, list or call"),
        ("NoamDecay(**{'warmup_steps': 2})", "write the arguments out"),
        ("NoamDecay(512)", r"`NoamDecay\(512\)` fails: .*missing.*'warmup_steps'"),
        ("NoamDecay(512, 0)", "fails: `warmup_steps` must be a positive integer"),
        (
            "LinearWarmup(CosineDecay(1e-3, 0), 5)",
            r"`CosineDecay\(0.001, 0\)` fails: .*must be > 0",
        ),
    ],
)
def test_what_is_no_schedule_is_one_sentence_and_never_run(text, sentence, capfd):
    with pytest.raises(ValueError, match=sentence) as refused:
        diagnostics.read_schedule(text)
    assert "\n" not in str(refused.value)
    assert "run" not in capfd.readouterr().out


RESTARTS = CosineDecayRestarts(1.0, 4)
STEPS = 40


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (0.5, []),
        (ExponentialDecay(1.0, 5, 0.5), []),
        (PolynomialDecay(1.0, 9), [(9, "end of decay")]),
        (PolynomialDecay(1.0, 9, cycle=True), [(10, "restart"), (19, "restart"), (28, "restart")]),
        (CosineDecay(1.0, 9), [(9, "end of decay")]),
        (
            CosineDecay(0.0, 9, warmup_target=1.0, warmup_steps=3),
            [(3, "end of warmup"), (12, "end of decay")],
        ),
        (RESTARTS, [(4, "restart"), (12, "restart"), (28, "restart")]),
        (CosineDecayRestarts(1.0, 16, t_mul=0.5), [(16, "restart"), (24, "restart")]),
        (PiecewiseConstantDecay([3, 5], [3.0, 2.0, 1.0]), [(4, "next rate"), (6, "next rate")]),
        (schedules.NoamDecay(8, 9), [(9, "end of warmup")]),
        (schedules.ScaledSchedule(PolynomialDecay(1.0, 9), 2), [(9, "end of decay")]),
        (
            schedules.LinearWarmup(PolynomialDecay(1.0, 9), 3),
            [(3, "end of warmup"), (12, "end of decay")],
        ),
        (
            schedules.WarmupStableDecay(1.0, total_steps=20, warmup_steps=2, decay_steps=5),
            [(2, "end of warmup"), (15, "decay begins"), (20, "end of decay")],
        ),
        (
            schedules.JoinedSchedule(
                [PolynomialDecay(1.0, 9), PolynomialDecay(1.0, 9), 0.1], [4, 20]
            ),
            [(4, "next schedule"), (13, "end of decay"), (20, "next schedule")],
        ),
        (
            schedules.JoinedSchedule([0.1, schedules.LinearWarmup(RESTARTS, 3)], [10]),
            [(10, "next schedule"), (13, "end of warmup"), (17, "restart"), (25, "restart")],
        ),
    ],
)
def test_turns_by_hand(schedule, expected):
    found = [turn for turn in _schedule_turns.turns(schedule, STEPS) if turn[0] < STEPS]
    assert found[: len(expected)] == expected
    if not isinstance(schedule, CosineDecayRestarts | PolynomialDecay):
        assert found == expected


def test_at_a_restart_the_rate_has_just_risen_and_at_a_next_rate_it_has_just_changed():
    for schedule in (
        RESTARTS,
        PolynomialDecay(1.0, 9, cycle=True),
        diagnostics.read_schedule("PiecewiseConstantDecay([3, 5], [1.0, 2.0, 3.0])"),
    ):
        rates = schedules.preview(schedule, STEPS)
        turns = {step for step, _ in _schedule_turns.turns(schedule, STEPS) if step < STEPS}
        assert {step for step in range(1, STEPS) if rates[step] > rates[step - 1]} == turns


@few
@given(generators.learning_rate_schedules, st.integers(1, 120))
def test_milestones_are_rates_of_the_schedule(schedule, steps):
    (found,) = diagnostics.compare_schedules({"x": schedule}, steps=steps).milestones.values()
    rates = schedules.preview(schedule, steps)
    assert [each.step for each in found] == sorted({each.step for each in found})
    events = {event: each.step for each in found for event in each.event.split(", ")}
    assert (events["first"], events["last"]) == (0, steps - 1)
    for each in found:
        assert each.learning_rate == pytest.approx(rates[each.step], rel=1e-5, abs=1e-9)
    highest = rates[events.get("peak", 0)]
    assert highest == pytest.approx(rates.max(), rel=1e-5)


def dots_of(lines):
    """Read a chart back: whether each dot is drawn, row by row."""
    curves = [line[AXIS:] for line in lines[:-2]]
    columns = len(lines[-2]) - AXIS
    dots = np.zeros((4 * len(curves), 2 * columns), bool)
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]  # of Unicode's bits
    for row, curve in enumerate(curves):
        for column, character in enumerate(curve):
            for bit, (down, right) in enumerate(places):
                is_drawn = (ord(character) - 0x2800) >> bit & 1
                dots[4 * row + down, 2 * column + right] = is_drawn
    return dots


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=400), st.sampled_from([30, 80]))
def test_every_rate_has_its_dot_and_the_curve_has_no_gap(rates, width):
    rates = np.array(rates)
    lines = _chart.chart(np.arange(len(rates)), rates, low=0.0, high=1.0, width=width, height=9)
    assert max(map(len, lines)) <= width
    dots = dots_of(lines)
    rows, columns = dots.shape
    for step, rate in enumerate(rates):
        column = min(int(step / max(len(rates) - 1, 1) * columns + 1e-9), columns - 1)
        near = dots[:, max(column - 1, 0) : column + 2].any(axis=1)
        assert near[round((1 - rate) * (rows - 1))]
    assert dots.any(axis=0).all()
    spans = [np.flatnonzero(column) for column in dots.T]
    for left, right in itertools.pairwise(spans):
        assert np.ptp(left) + 1 == len(left)  # from the least to the greatest without a gap
        assert left[0] <= right[-1] + 1
        assert right[0] <= left[-1] + 1


def test_a_chart_in_ascii_has_the_same_form():
    lines = _chart.chart(np.arange(9), np.arange(9.0), low=0.0, high=8.0, width=40, height=5)
    plain = [_chart.in_ascii(line) for line in lines]
    assert "".join(plain).isascii()
    assert [*map(len, plain)] == [*map(len, lines)]
    assert plain[0].strip().startswith("8 |")
    assert plain[0].endswith("*")


@pytest.mark.parametrize("length", [1, 2, 7, 99, 1000, 123_456, 10**9])
@pytest.mark.parametrize("columns", [20, 69])
def test_the_labels_of_steps_stand_apart(length, columns):
    axis, labels = _chart._step_axis(0, length - 1, columns)
    numbers = [int(label.replace(",", "")) for label in labels.split()]
    assert numbers[0] == 0
    assert len(numbers) == axis.count("┬")
    assert np.all(np.diff(numbers) == np.diff(numbers)[:1])
    assert max(numbers) <= length - 1


def test_the_curves_share_their_axes_and_fit_80_columns():
    low, high = PolynomialDecay(1.0, 100), PolynomialDecay(4.0, 100)
    said = str(diagnostics.compare_schedules({"low": low, "high": high}))
    assert said.count("4 ┤") == 2
    assert max(map(len, said.splitlines())) <= 80
    assert said.index("low\n") < said.index("high\n")
    assert said.count("end of") == 0  # step 100 is one past the last of such a run


def test_constant_rates_are_drawn_too():
    said = str(diagnostics.compare_schedules({"zero": 0.0, "some": 0.3}, steps=5))
    assert "0.3 ┤" in said
    assert "1 ┤" in str(diagnostics.compare_schedules({"zero": 0.0}, steps=1))


def test_the_longest_decay_says_how_many_steps():
    given = {"a": schedules.warmup_cosine(1.0, total_steps=70, warmup_steps=5), "b": 0.1}
    assert diagnostics.compare_schedules(given).steps == 70


class Broken(LearningRateSchedule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def __call__(self, step):
        if self.rate is None:
            raise RuntimeError("mine")
        return self.rate / keras.ops.cast(step, "float32")


@pytest.mark.parametrize(
    ("schedules_given", "steps", "sentence"),
    [
        ({}, 5, "There is no schedule to compare"),
        ({"a": 0.1}, None, "None of the schedules has an end.*`steps`"),
        ({"a": schedules.NoamDecay(8, 9)}, None, "None of the schedules has an end"),
        ({"a": 0.1}, 0, "`steps` must be a positive integer"),
        ({"a": "cosine"}, 5, "must be a keras.*'cosine'"),
        ({"a": Broken(None)}, 5, "^`a` fails when it is called: RuntimeError: mine$"),
        ({"a": Broken(1.0)}, 5, "`a` gives a rate that is not finite. Received: step=0, rate=inf"),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(schedules_given, steps, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnostics.compare_schedules(schedules_given, steps=steps)
