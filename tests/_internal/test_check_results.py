import pytest

from kdpkit._internal.check_results import Finding

LONG = Finding(
    "dynamic-shape",
    "error",
    "train, x['token_ids']",
    "A sentence that goes on and on, since it says with all its words what is wrong with this. "
    * 3,
    "Another one of that kind, which names " + "/a/path/that/is/longer/than/a/line" * 3,
)


def test_a_finding_reads_well_at_80_columns_and_does_not_break_paths():
    lines = str(LONG).splitlines()
    assert lines[0] == "error    dynamic-shape: train, x['token_ids']"
    assert all(len(line) <= 80 for line in lines if "/a/path" not in line)
    assert any("/a/path/that/is/longer/than/a/line" * 3 in line for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


def test_an_unknown_level_raises():
    with pytest.raises(ValueError, match="`level` must be one of 'error', 'wrong', .*'bad'"):
        Finding("rule", "bad", "here", "Wrong.", "Fix it.")
