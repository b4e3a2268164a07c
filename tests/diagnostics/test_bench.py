"""What `bench` concludes from its figures: worked by hand, where no machine is needed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import diagnostics
from kdpkit.diagnostics import BenchReport, BenchRow, _child_program
from kdpkit.diagnostics._bench import benchmark, timed_training, workloads


def row(replicas, size, steps_per_second, **settings):
    figures = {"quartiles": (steps_per_second, steps_per_second)}
    return BenchRow(
        replicas, size, "measured", steps_per_second, **figures | settings, peak_memory_gib=1.0
    )


def report(*rows, scaling="weak", accelerators=0):
    rows = tuple(benchmark._with_efficiency(one, rows, scaling) for one in rows)
    return BenchReport("cnn", "tensorflow", scaling, accelerators, rows)


def test_weak_scaling_compares_with_one_device_that_has_the_same_per_replica_batch():
    found = report(row(1, 32, 10.0), row(2, 32, 8.0), row(4, 32, 5.0), row(2, 64, 8.0))
    assert [one.examples_per_second for one in found.rows] == [320, 512, 640, 1024]
    assert [one.efficiency for one in found.rows] == [1.0, 0.8, 0.5, None]  # of 64 there is no one


def test_strong_scaling_compares_with_one_device_that_has_the_same_global_batch():
    found = report(row(1, 64, 10.0), row(2, 32, 15.0), row(4, 16, 20.0), scaling="strong")
    assert [one.global_batch_size for one in found.rows] == [64] * 3
    assert [one.efficiency for one in found.rows] == [1.0, 0.75, 0.5]


@given(
    alone=st.floats(1e-3, 1e3),
    ratio=st.floats(0.01, 4.0),
    replicas=st.integers(2, 16),
    size=st.integers(1, 1000),
)
def test_with_the_same_global_batch_a_step_as_fast_is_an_efficiency_of_one_in_r(
    alone, ratio, replicas, size
):
    weak = report(row(1, size, alone), row(replicas, size, alone * ratio))
    strong = report(
        row(1, size * replicas, alone), row(replicas, size, alone * ratio), scaling="strong"
    )
    assert weak.rows[1].efficiency == pytest.approx(ratio)
    assert strong.rows[1].efficiency == pytest.approx(ratio / replicas)
    assert max(map(len, str(weak).splitlines())) <= 80


@pytest.mark.parametrize(
    ("steps", "accelerators", "words"),
    [
        (5.0, 0, ["share the same cores", "1.00 times", "nothing is gained"]),
        (9.0, 0, ["share the same cores", "1.80 times"]),
        (9.0, 2, ["2 replicas with 32 examples each train 1.80 times"]),
    ],
)
def test_the_verdict_says_what_replicas_gain(steps, accelerators, words):
    found = report(row(1, 32, 10.0), row(2, 32, steps), accelerators=accelerators)
    assert all(word in found.verdict for word in words)


def test_the_verdict_names_the_fastest_batch_and_doubts_an_unsteady_speed():
    found = report(row(1, 32, 10.0), row(1, 64, 9.7), row(1, 128, 5.0))
    assert all(number in found.verdict for number in ("of 128", "640 ex", "of 64", "97%"))
    shaken = report(row(1, 32, 10.0, quartiles=(7.0, 11.0)))
    assert "varied by 40%" in shaken.verdict


def row_of(exit_code, *reports, stderr=""):
    lines = [f"{_child_program._SIGN}{json.dumps(one)}" for one in reports]
    outcome = _child_program.outcome(exit_code, 9.0, "\n".join(lines), stderr)
    return benchmark._row(BenchRow(1, 32, "failed"), outcome)


def test_rounds_give_their_median_and_quartiles():
    output = {
        "result": "works",
        "per_replica_batch_size": 32,
        "seconds_of_steps": [0.5, 0.25, 0.2, 0.1, 1.0],
        "peak_memory_gib": 1.0,
        "memory_of": "process",
        "where": "1 replica on CPU:0",
    }
    found = row_of(0, output)
    assert (found.steps_per_second, found.quartiles) == (4.0, (2.0, 5.0))
    once = row_of(0, output | {"seconds_of_steps": [0.5]})
    assert (once.steps_per_second, once.quartiles) == (2.0, (2.0, 2.0))


@pytest.mark.parametrize(
    ("found", "result", "reason"),
    [
        (row_of(None), "timed out", "within 9 s"),
        (row_of(137), "out of memory", "SIGKILL"),
        (row_of(134, stderr="std::bad_alloc\n"), "out of memory", "SIGABRT: std::bad_alloc"),
        (row_of(139), "failed", "SIGSEGV"),
        (row_of(1, stderr="no such thing\n"), "failed", "exit code 1: no such thing"),
        (row_of(2, {"result": "cannot", "reason": "No."}), "cannot", "No."),
        (row_of(1, {"result": "failed", "reason": "MemoryError: a"}), "out of memory", "a"),
    ],
)
def test_what_is_not_measured_is_a_row_with_its_reason(found, result, reason):
    assert found.result == result
    assert reason in found.reason
    assert not report(found).works
    shown = report(row(1, 16, 1.0), found)
    assert shown.works == (result in ("cannot", "out of memory"))
    assert max(map(len, str(shown).splitlines())) <= 80
    assert json.loads(json.dumps(shown.to_dict()))["rows"][1]["examples_per_second"] is None


@pytest.mark.parametrize(("gpus", "counts"), [(0, [2]), (1, []), (2, [2]), (6, [2, 4, 6])])
def test_without_a_number_replicas_go_up_to_all_gpus(gpus, counts, monkeypatch):
    monkeypatch.setattr("kdpkit._internal.cpu_threads.cores", lambda: 8)
    measuring = benchmark._Measuring({}, "jax", 1.0, print)
    measuring.accelerators = gpus
    assert measuring._all_counts() == counts


TARGETS = """
import keras
def uncompiled():
    return [0.0], keras.Sequential([keras.layers.Dense(3)])
def fails():
    raise RuntimeError("no data")
number = 3
"""


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("uncompiled", "`model` is not compiled"),
        ("number", r"must be a function that returns \(dataset, model\)"),
        ("nothing", "`train.py` has no `nothing`"),
        ("fails", "fails: RuntimeError: no data"),
    ],
)
def test_a_target_that_gives_no_training_raises(tmp_path, monkeypatch, name, reason):
    from kdpkit.strategies import select_strategy

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TARGETS)
    with pytest.raises(ValueError, match=reason):
        workloads.of_target(select_strategy("one"), f"train.py:{name}")


def test_examples_that_no_memory_holds_are_not_made():
    with pytest.raises(MemoryError, match="The examples of a batch alone need"):
        timed_training.batch_of((np.zeros((4, 8)), None), 10**18)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replicas": []}, "`replicas`.*or several"),
        ({"per_replica_batch_size": "32"}, "`per_replica_batch_size`.*'32'"),
        ({"global_batch_size": 100, "replicas": [3]}, "nearest sizes that work are 99 and 102"),
        ({"global_batch_size": 8, "per_replica_batch_size": 8}, "weak scaling"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds`.*nan"),
        ({"jit": "yes"}, "`jit`.*'yes'"),
        ({"backend": "torch"}, "`backend`.*'torch'"),
        ({"workload": "gpt"}, "`workload`.*'gpt'"),
        ({"target": "train.py:make", "workload": "cnn"}, "a target or a workload"),
        ({"target": "nowhere.py:make"}, "There is no such file: nowhere.py"),
    ],
)
def test_bad_input_raises_before_a_process_starts(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnostics.bench(**settings, on_start=lambda _: pytest.fail("started"))
