"""Schedules read from text, drawn in characters, and their milestones."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.optimizers.schedules import (
    CosineDecay,
    ExponentialDecay,
    LearningRateSchedule,
    PolynomialDecay,
)

from kdpkit import diagnostics, schedules
from kdpkit.diagnostics._rates import rate_milestones, terminal_chart
from tests import generators

few = settings(max_examples=40)


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
        ("", "`` is not a schedule. Write a call such as"),
        ("x = 1", "is not a schedule"),
        ("'0.1'", "is not a schedule"),
        ("-0.1", "`schedule` must be at least 0"),
        ("1e999", "must be a finite number"),
        ("(" * 5000 + ")" * 5000, "is not a schedule"),
        ("__import__('os').system('echo run')", r"no schedule `__import__\('os'\).system`"),
        ("(lambda: 1)()", "There is no schedule"),
        ("preview(0.1, 5)", "There is no schedule `preview`"),
        ("_Schedule()", "There is no schedule `_Schedule`"),
        ("CosinDecay(1e-3, 5)", "Do you mean `CosineDecay`?"),
        ("NoamDecay(512, steps)", "`steps` in `NoamDecay.512, steps.` is not a number"),
        ("NoamDecay(*[1, 2])", "is not a number, string, list or call"),
        ("NoamDecay(**{'warmup_steps': 2})", "fails: "),
        ("NoamDecay(512)", r"`NoamDecay\(512\)` fails: .*missing.*'warmup_steps'"),
    ],
)
def test_what_is_no_schedule_is_one_sentence_and_never_run(text, sentence, capfd):
    with pytest.raises(ValueError, match=sentence) as error:
        diagnostics.read_schedule(text)
    assert "\n" not in str(error.value)
    assert "run" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (0.5, []),
        (ExponentialDecay(1.0, 5, 0.5), []),
        (PolynomialDecay(1.0, 9), [(9, "end of decay")]),
        (PolynomialDecay(1.0, 9, cycle=True), []),
        (CosineDecay(1.0, 9), [(9, "end of decay")]),
        (
            CosineDecay(0.0, 9, warmup_target=1.0, warmup_steps=3),
            [(3, "end of warmup"), (12, "end of decay")],
        ),
        (schedules.NoamDecay(8, 9), [(9, "end of warmup")]),
        (schedules.ScaledSchedule(PolynomialDecay(1.0, 9), 2), [(9, "end of decay")]),
        (
            schedules.WarmupStableDecay(1.0, total_steps=20, warmup_steps=2, decay_steps=5),
            [(2, "end of warmup"), (15, "decay begins"), (20, "end of decay")],
        ),
        (
            schedules.JoinedSchedule([schedules.NoamDecay(8, 9), PolynomialDecay(1.0, 9)], [20]),
            [(9, "end of warmup"), (20, "next schedule"), (29, "end of decay")],
        ),
    ],
)
def test_where_warmup_and_decay_end_by_hand(schedule, expected):
    assert rate_milestones.changes_of(schedule) == expected


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


def test_a_peak_of_one_step_is_drawn_and_the_curve_has_no_gap():
    rates = np.zeros(10_000)
    rates[1234] = 1.0
    text = terminal_chart.chart(np.arange(10_000), rates, high=1.0, width=80, height=9)
    rows = [line[11:] for line in text.splitlines()[:-1]]
    assert max(map(len, text.splitlines())) <= 80
    assert all(row.strip(" \u2800") for row in rows)  # the peak, from top to bottom
    assert len(rows[-1]) == 80 - 11


def test_the_curves_share_their_axes_and_fit_80_columns():
    low, high = PolynomialDecay(1.0, 100), PolynomialDecay(4.0, 100)
    output = str(diagnostics.compare_schedules({"low": low, "high": high}))
    assert output.count("4 |") == 2
    assert max(map(len, output.splitlines())) <= 80
    assert output.index("low\n") < output.index("high\n")
    assert output.count("end of") == 0  # step 100 is one past the last of such a run


def test_constant_rates_are_drawn_too():
    output = str(diagnostics.compare_schedules({"zero": 0.0, "some": 0.3}, steps=5))
    assert "0.3 |" in output
    assert "1 |" in str(diagnostics.compare_schedules({"zero": 0.0}, steps=1))


def test_a_decay_over_a_part_of_a_step_is_looked_at_to_the_end_of_that_step():
    comparison = diagnostics.compare_schedules({"x": CosineDecay(1.0, 10.5)})
    assert comparison.steps == 11
    assert comparison.milestones["x"][-1].step == 10


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
        ({"a": schedules.NoamDecay(8, 9)}, None, "None of the schedules has a known end"),
        ({"a": "cosine"}, 5, "must be a keras.*'cosine'"),
        ({"a": Broken(None)}, 5, "^`a` fails when it is called: RuntimeError: mine$"),
        ({"a": Broken(1.0)}, 5, "`a` has a rate that is not finite. Received: step=0, rate=inf"),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(schedules_given, steps, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnostics.compare_schedules(schedules_given, steps=steps)
