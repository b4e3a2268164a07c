"""What the benchmarks make of their figures."""

import re

import pytest

from tools.benchmarks import __main__ as command
from tools.benchmarks.paired import Row, Spread, compared, in_turns


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    row = compared("x", "ms", [10.0, 30.0, 20.0], [20.0, 20.0, 80.0], goal=("<=", 0.5))
    assert row.ours == Spread(20.0, 15.0, 25.0)
    assert row.other.median == 20.0
    assert row.ratio == Spread(0.5, 0.375, 1.0)
    assert row.is_met


@pytest.mark.parametrize(
    ("goal", "met"), [((">=", 2.0), True), ((">=", 2.1), False), (("<=", 1.9), False)]
)
def test_a_goal_is_of_the_ratio_or_of_our_figure_alone(goal, met):
    assert compared("x", "ms", [4.0], [2.0], goal=goal).is_met is met
    assert Row("x", "s", Spread.of([2.0]), goal=goal).is_met is met
    assert compared("x", "ms", [4.0], [2.0]).is_met is None


def test_every_round_begins_with_another_and_the_first_counts_for_nothing():
    order = []

    def contestant(name):
        return lambda: order.append(name) or len(order)

    figures = in_turns({name: contestant(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacababc"
    assert figures == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}


@pytest.mark.slow
def test_the_command_prints_what_it_measures(capsys):
    assert command.main(["machine", "--rounds", "1"]) == 0
    rows = re.findall(r"\| limit: .* \| (G\S+/s) \| ([\d.,]+) \|", capsys.readouterr().out)
    assert [unit for unit, _ in rows] == ["GFLOP/s"] * 2 + ["GiB/s"] * 2
    assert all(float(figure.replace(",", "")) > 0 for _, figure in rows)
