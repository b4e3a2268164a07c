"""What the trial of XLA decides, of given times."""

import pytest

from kdpkit.training.tensorflow._xla import XlaTrial


def tried(seconds, compiling, steps=1):
    """Give a trial that has decided, and its calls as (with XLA, of how many)."""
    trial, calls = XlaTrial(), []
    while not trial.verdict and len(calls) < 1000:
        first = trial.jit not in calls
        calls.append(trial.jit)
        trial.record(steps=steps, seconds=compiling if first else seconds[trial.jit])
    return trial, calls


@pytest.mark.parametrize(
    ("plain", "compiled", "choice"), [(0.3, 0.2, True), (0.2, 0.3, False), (0.2, 0.2, False)]
)
def test_the_faster_way_wins_and_compiling_does_not_count(plain, compiled, choice):
    trial, calls = tried({False: plain, True: compiled}, compiling=60.0 if choice else 0.0)
    assert trial.jit is choice
    assert calls == [False, True] * 6


def test_short_calls_are_timed_until_they_add_up():
    trial, calls = tried({False: 0.001, True: 0.002}, compiling=1.0)
    assert trial.jit is False
    assert calls.count(False) - 1 == pytest.approx(200, abs=1)


def test_one_slow_call_decides_nothing():
    trial = XlaTrial()
    for number in range(12):
        trial.record(steps=10, seconds=100.0 if number == 5 else 2.0 if trial.jit else 3.0)
    assert trial.verdict == "XLA: on, a step takes 200 ms with it and 300 ms without."
