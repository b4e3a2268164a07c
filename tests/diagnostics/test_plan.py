"""Plans: their numbers by hand and as laws, and where a rule leaves its range."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import diagnostics, scaling, schedules
from kdpkit.diagnostics._plan import training_plan
from tests import oracles

# Both backends round a rate by its place in the vector.
ULPS = 5e-7
RUN = {"examples": 60_000, "per_replica_batch_size": 32, "base_learning_rate": 0.1}


def plan(**changes):
    return diagnostics.plan(**{**RUN, **changes})


def rules(made):
    return {(finding.rule, finding.level) for finding in made.findings}


plans = st.builds(
    plan,
    examples=st.integers(1, 5000),
    per_replica_batch_size=st.integers(1, 64),
    base_learning_rate=st.floats(1e-5, 1.0),
    epochs=st.integers(1, 20),
    replicas=st.integers(1, 32),
    rule=st.sampled_from(scaling.RULES),
    accumulation=st.integers(1, 8),
    optimizer=st.sampled_from([None, "sgd", "adam"]),
    shape=st.sampled_from(training_plan.SHAPES),
    warmup_steps=st.integers(0, 60),
    remainder=st.sampled_from(training_plan.REMAINDERS),
    shuffle_buffer=st.integers(0, 6000),
)


def test_a_run_on_eight_replicas_by_hand():
    """60,000 = 234 * 256 + 96; an update is made of every step."""
    made = plan(replicas=8, epochs=5, warmup_epochs=1, shape="cosine", optimizer="sgd")
    assert made.scale.global_batch_size == 256
    assert (made.steps_per_epoch, made.left_out, made.padded) == (234, 96, 0)
    assert (made.total_steps, made.updates) == (1170, 1170)
    assert made.last_batch == (32,) * 8
    assert made.warmup_steps == 234
    assert made.scale.learning_rate == pytest.approx(0.8)
    steps, events, rates = zip(
        *((each.step, each.event, each.learning_rate) for each in made.milestones), strict=True
    )
    assert steps == (0, 234, 585, 1169)
    assert events == ("first", "end of warmup", "middle", "last")
    # The middle is 351 of the decay's 936 steps: 0.8 * (1 + cos(3 pi / 8)) / 2.
    expected = [0, 0.8, 0.4 * (1 + np.cos(3 * np.pi / 8)), 0.4 * (1 - np.cos(np.pi / 936))]
    np.testing.assert_allclose(rates, expected, rtol=1e-3, atol=1e-7)
    assert made.clean


@pytest.mark.parametrize(
    ("remainder", "steps", "left_out", "padded", "last"),
    [
        ("drop", 3, 1, 0, (1, 1, 1)),
        ("pad", 4, 0, 2, (1, 1, 1)),
        ("keep", 4, 0, 0, (1, 0, 0)),
    ],
)
def test_a_smaller_last_batch_by_hand(remainder, steps, left_out, padded, last):
    """10 examples on 3 replicas of one example each."""
    made = plan(examples=10, per_replica_batch_size=1, replicas=3, remainder=remainder)
    assert (made.steps_per_epoch, made.left_out, made.padded) == (steps, left_out, padded)
    assert made.last_batch == last


def test_accumulated_batches_make_fewer_updates_and_a_larger_rate():
    made = plan(replicas=4, accumulation=3, epochs=2)
    assert (made.total_steps, made.updates) == (936, 312)
    assert made.scale.learning_rate == pytest.approx(1.2)


def test_adams_settings_under_the_square_root_rule_by_hand():
    made = plan(replicas=2, accumulation=2, rule="sqrt", base_learning_rate=1e-3, beta_2=0.98)
    assert made.adam.learning_rate == pytest.approx(2e-3) == made.scale.learning_rate
    assert (made.adam.beta_1, made.adam.beta_2) == pytest.approx((0.6, 0.92))
    assert made.adam.epsilon == pytest.approx(5e-8)
    for other in (plan(replicas=4), plan(replicas=4, rule="sqrt", optimizer="sgd")):
        assert other.adam is None


def test_a_stable_decay_falls_over_the_last_fifth():
    made = plan(per_replica_batch_size=600, shape="stable-decay", warmup_steps=10)
    assert made.decay_steps == 20
    assert [(each.step, each.event) for each in made.milestones] == [
        (0, "first"),
        (10, "end of warmup"),
        (50, "middle"),
        (80, "decay begins"),
        (99, "last"),
    ]
    assert made.milestones[-1].learning_rate == pytest.approx(0.1 / 20)


@pytest.mark.slow
@given(plans)
def test_every_example_of_an_epoch_is_in_a_batch_or_left_out(made):
    size, steps = made.scale.global_batch_size, made.steps_per_epoch
    if made.remainder == "keep":
        assert (steps - 1) * size + sum(made.last_batch) == made.examples
    else:
        assert steps * size + made.left_out - made.padded == made.examples
        assert sum(made.last_batch) == (size if steps else 0)
    assert len(made.last_batch) == made.scale.replicas
    assert made.updates == made.total_steps // made.scale.accumulation


@settings(max_examples=60)
@given(plans)
def test_milestones_are_rates_of_the_schedule(made):
    if not made.has_schedule:
        assert made.milestones == ()
        with pytest.raises(ValueError, match="too few steps for its schedule"):
            made.schedule()
        return
    schedule, peak = made.schedule(), made.scale.learning_rate
    steps = [milestone.step for milestone in made.milestones]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, made.total_steps - 1)
    for milestone in made.milestones:
        rate = np.float32(milestone.learning_rate)
        alone = schedules.preview(schedule, [milestone.step])[0]
        np.testing.assert_allclose(rate, alone, rtol=ULPS, atol=1e-7 * peak)
        expected = oracles.learning_rate(schedule, milestone.step)
        np.testing.assert_allclose(rate, expected, rtol=1e-4, atol=1e-6 * peak)
        assert milestone.event != "end of warmup" or rate == pytest.approx(peak)
    assert max(schedules.preview(schedule, made.total_steps)) <= peak * (1 + 1e-6)


@settings(max_examples=60)
@given(plans)
def test_a_plan_fits_80_columns_and_survives_json(made):
    assert max(map(len, str(made).splitlines())) <= 80
    given_back = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert given_back["global_batch_size"] == made.scale.global_batch_size
    assert given_back["clean"] == made.clean
    assert len(given_back["findings"]) == len(made.findings)
    assert str(made).count("Remedy:") == len(made.findings)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("remainder", training_plan.REMAINDERS)
@pytest.mark.parametrize("examples", [24, 26])
def test_a_real_pipeline_gives_the_batches_of_the_plan(remainder, examples):
    import tensorflow as tf

    from kdpkit import pipelines

    made = plan(examples=examples, per_replica_batch_size=2, replicas=4, remainder=remainder)
    batches = pipelines.train_pipeline(
        tf.data.Dataset.range(examples),
        pipelines.PipelineConfig(remainder=remainder),
        global_batch_size=made.scale.global_batch_size,
        replicas=4,
    )
    rows = [len(keras.tree.flatten(batch)[0]) for batch in batches]
    assert len(rows) == made.steps_per_epoch
    assert sum(rows) == examples - made.left_out + made.padded
    assert rows[-1] == sum(made.last_batch)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"replicas": 8, "optimizer": "sgd"}, set()),
        ({"replicas": 9, "optimizer": "sgd"}, {("linear-without-warmup", "wrong")}),
        ({"replicas": 9, "optimizer": "sgd", "warmup_steps": 9}, set()),
        ({"replicas": 256, "optimizer": "sgd", "warmup_steps": 5}, set()),
        (
            {"replicas": 257, "optimizer": "sgd", "warmup_steps": 5, "remainder": "pad"},
            {("linear-large-batch", "wrong")},
        ),
        ({"replicas": 2, "optimizer": "adam"}, {("linear-adam", "wrong")}),
        ({"optimizer": "adam"}, set()),
        ({"replicas": 2}, {("optimizer", "note")}),
        ({"replicas": 16, "rule": "sqrt", "optimizer": "adam"}, {("adam-factor", "error")}),
        ({"replicas": 16, "rule": "sqrt"}, {("adam-factor", "note")}),
        ({"replicas": 10, "rule": "sqrt", "optimizer": "adam"}, set()),
        ({"replicas": 16, "rule": "sqrt", "optimizer": "sgd"}, set()),
        ({"warmup_steps": 1875, "shape": "cosine"}, {("long-warmup", "error")}),
        ({"warmup_steps": 1874, "shape": "cosine"}, set()),
        ({"warmup_steps": 1875}, {("long-warmup", "wrong")}),
        ({"warmup_steps": 1874, "shape": "stable-decay"}, set()),
        ({"accumulation": 1876, "rule": "none"}, {("no-update", "wrong")}),
        ({"examples": 60_000, "per_replica_batch_size": 3000}, set()),
        ({"examples": 63_157, "per_replica_batch_size": 60_000}, set()),  # 4.999 %
        (
            {"examples": 63_158, "per_replica_batch_size": 60_000, "shuffle_buffer": 63_158},
            {("dropped", "wrong")},  # 5.0002 %
        ),
        ({"examples": 31}, {("large-batch", "error")}),
        ({"examples": 31, "remainder": "pad"}, {("large-batch", "wrong")}),
        ({"examples": 33, "replicas": 8, "rule": "none"}, {("large-batch", "error")}),
        ({"remainder": "keep", "replicas": 7, "rule": "none"}, {("uneven-batch", "note")}),
        ({"shuffle_buffer": 31}, {("small-shuffle", "wrong")}),
        ({"shuffle_buffer": 599}, {("small-shuffle", "note")}),
        ({"shuffle_buffer": 600}, set()),
    ],
)
def test_what_leaves_its_range_is_found_and_no_more(changes, found):
    buffer = {"shuffle_buffer": 10**6} if "per_replica_batch_size" in changes else {}
    made = plan(**{**buffer, **changes})
    assert rules(made) == found
    assert made.clean == all(level == "note" for _, level in found)
    for finding in made.findings:
        assert finding.problem
        assert finding.remedy


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"replicas": 16, "rule": "sqrt"}, "must be at most 10"),
        ({"examples": 3, "replicas": 4}, "Use at most 3 replicas"),
        ({"examples": 9, "replicas": 4}, "at most 2 examples per replica"),
        ({"examples": 50, "replicas": 1, "shuffle_buffer": 50}, "18 of 50 examples (36.0%)"),
        ({"remainder": "keep", "replicas": 7, "examples": 225}, "6 of them get no example"),
    ],
)
def test_findings_contain_the_numbers(changes, sentence):
    output = " ".join(f"{each.problem} {each.remedy}" for each in plan(**changes).findings)
    assert sentence in output


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"examples": 0}, "`examples`.*0"),
        ({"shape": "round"}, "`shape`.*'round'"),
        ({"optimizer": "lion"}, "`optimizer`.*'lion'"),
        ({"remainder": "wrap"}, "`remainder`.*'wrap'"),
        ({"warmup_steps": 5, "warmup_epochs": 1}, "in steps or in epochs.*warmup_epochs=1"),
        ({"warmup_epochs": -0.5}, "`warmup_epochs`.*-0.5"),
        ({"end_learning_rate": 0.2, "shape": "cosine"}, "at most 0.1.*=0.2"),
        ({"end_learning_rate": 0.05}, "A constant rate ends where it began"),
    ],
)
def test_bad_arguments_get_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(**changes)


def test_a_constant_rate_loads_no_framework():
    code = (
        "import sys\nfrom kdpkit import diagnostics\n"
        f"made = diagnostics.plan(**{RUN}, replicas=8)\nstr(made), made.to_dict()\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'keras', 'tensorflow', 'jax'})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert loaded.stdout.strip() == ""
