"""What the benchmarks make of their figures."""

import json

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks.paired import Row, Spread, compared, in_turns


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    row = compared("x", "ms", [10.0, 30.0, 20.0], [20.0, 20.0, 80.0], goal=("<=", 0.5))
    assert row.ours == Spread(20.0, 15.0, 25.0)
    assert row.other.median == 20.0
    assert row.ratio == Spread(0.5, 0.375, 1.0)
    assert row.is_met


@pytest.mark.parametrize(
    ("goal", "met"),
    [((">=", 2.0), True), ((">=", 2.1), False), (("<=", 1.9), False)],
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
def test_the_command_measures_and_writes_what_it_prints(tmp_path, capsys):
    files = {"--json": tmp_path / "rows.json", "--markdown": tmp_path / "rows.md"}
    flags = [str(part) for flag in files.items() for part in flag]
    assert command.main(["machine", "--rounds", "1", *flags]) == 0
    report = json.loads(files["--json"].read_text())
    assert {row["unit"] for row in report["rows"]} == {"GFLOP/s", "GiB/s"}
    assert all(row["ours"]["median"] > 0 for row in report["rows"])
    assert files["--markdown"].read_text().strip() in capsys.readouterr().out
