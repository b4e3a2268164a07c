"""Plans: their numbers by hand and as laws, and where a rule leaves its range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import diagnostics, scaling

RUN = {"examples": 60_000, "per_replica_batch_size": 32, "base_learning_rate": 0.1}


def plan(**changes):
    return diagnostics.plan(**{**RUN, **changes})


plans = st.builds(
    plan,
    examples=st.integers(1, 5000),
    per_replica_batch_size=st.integers(1, 64),
    base_learning_rate=st.floats(1e-5, 1.0),
    epochs=st.integers(2, 20),
    replicas=st.integers(1, 32),
    rule=st.sampled_from(scaling.RULES),
    optimizer=st.sampled_from([None, "sgd", "adam"]),
    warmup_epochs=st.floats(0, 1.9),
)


def test_a_run_on_eight_replicas_by_hand():
    """60,000 = 234 * 256 + 96."""
    made = plan(replicas=8, epochs=5, warmup_epochs=1, optimizer="sgd")
    assert made.scale.global_batch_size == 256
    assert (made.steps_per_epoch, made.left_out) == (234, 96)
    assert (made.total_steps, made.warmup_steps) == (1170, 234)
    assert made.scale.learning_rate == pytest.approx(0.8)
    assert made.clean


@given(plans)
def test_every_example_of_an_epoch_is_in_a_batch_or_left_out(made):
    size = made.scale.global_batch_size
    assert made.steps_per_epoch * size + made.left_out == made.examples
    assert 0 <= made.left_out < size


@given(plans)
def test_a_plan_fits_80_columns_and_has_all_findings(made):
    assert max(map(len, str(made).splitlines())) <= 80
    assert made.clean == all(finding.level == "note" for finding in made.findings)
    assert str(made).count("Remedy:") == len(made.findings)


@pytest.mark.parametrize(
    ("changes", "found", "sentence"),
    [
        ({"replicas": 8, "optimizer": "sgd"}, {}, ""),
        ({"replicas": 9, "optimizer": "sgd"}, {"linear-without-warmup": "wrong"}, "rate by 9"),
        ({"replicas": 9, "optimizer": "sgd", "warmup_epochs": 0.5}, {}, ""),
        ({"replicas": 2, "optimizer": "adam"}, {"linear-adam": "wrong"}, "'sqrt'"),
        ({"optimizer": "adam"}, {}, ""),
        ({"replicas": 2}, {}, ""),
        ({"replicas": 16, "rule": "sqrt"}, {}, ""),
        ({"examples": 63_157, "per_replica_batch_size": 60_000}, {}, ""),  # 4.999 %
        (
            {"examples": 63_158, "per_replica_batch_size": 60_000},
            {"dropped": "wrong"},
            "3,158 of 63,158 examples (5.0%)",
        ),
        ({"examples": 31}, {"large-batch": "error"}, "at most 31 examples per replica"),
        (
            {"examples": 3, "replicas": 4, "rule": "none"},
            {"large-batch": "error"},
            "Use at most 3 replicas",
        ),
    ],
)
def test_what_leaves_its_range_is_found_and_no_more(changes, found, sentence):
    made = plan(**changes)
    assert {finding.rule: finding.level for finding in made.findings} == found
    assert sentence in " ".join(f"{each.problem} {each.remedy}" for each in made.findings)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"examples": 0}, "`examples`.*0"),
        ({"optimizer": "lion"}, "`optimizer`.*'lion'"),
        ({"warmup_epochs": -0.5}, "`warmup_epochs`.*-0.5"),
        ({"warmup_epochs": 1}, "`warmup_epochs` must be at least 0 and below 1"),
        ({"base_learning_rate": 1e308, "replicas": 64}, "`learning_rate` must be a finite"),
    ],
)
def test_bad_arguments_get_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(**changes)
