"""What `bench` concludes from its figures: worked by hand, where no machine is needed."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import diagnostics
from kdpkit.diagnostics import BenchReport, BenchRow, _bench, _bench_child, _bench_text, _program

ORDER = _bench_child.Order("cnn", None, 1, 32, 1.0, 3, False, False)


def row(replicas, size, steps_per_second, **settings):
    figures = {"quartiles": (steps_per_second, steps_per_second), "machine_speed": 100.0}
    return BenchRow(
        replicas, size, "measured", steps_per_second, **figures | settings, peak_memory_gib=1.0
    )


def report(*rows, scaling="weak", accelerators=0):
    sizes = _bench._Sizes((None,), are_global=scaling == "strong")
    rows = tuple(_bench._held_against_one(one, rows, sizes) for one in rows)
    return BenchReport("cnn", "tensorflow", scaling, accelerators, rows)


def test_weak_scaling_holds_against_one_device_with_the_same_rows():
    found = report(row(1, 32, 10.0), row(2, 32, 8.0), row(4, 32, 5.0), row(2, 64, 8.0))
    assert [one.examples_per_second for one in found.rows] == [320, 512, 640, 1024]
    assert [one.efficiency for one in found.rows] == [1.0, 0.8, 0.5, None]  # of 64 there is no one


def test_strong_scaling_holds_against_one_device_with_the_same_global_batch():
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
    ("steps", "accelerators", "said"),
    [
        (5.0, 0, "2 replicas share the same cores: nothing is gained."),
        (5.4, 0, "2 replicas share the same cores: nothing is gained."),
        (4.0, 0, "2 replicas share the same cores: they train 0.80 times as fast as one device."),
        (9.0, 0, "2 replicas with 32 rows each train 1.80 times as fast as one device (90% eff"),
        (9.0, 2, "2 replicas with 32 rows each train 1.80 times as fast as one device (90% eff"),
        (5.0, 2, "2 replicas with 32 rows each train 1.00 times as fast as one device: nothing"),
    ],
)
def test_the_verdict_says_what_replicas_gain(steps, accelerators, said):
    found = report(row(1, 32, 10.0), row(2, 32, steps), accelerators=accelerators)
    assert said in found.verdict
    assert ("Each one more costs" in found.verdict) == bool(accelerators)


def test_the_cost_of_one_more_replica_is_carried_on_to_many():
    """A step of 100 ms takes 103 on 4: 1 ms for each, so 163 on 64, which do 64 / 1.63 as much."""
    found = report(row(1, 32, 10.0), row(4, 32, 1 / 0.103), accelerators=4)
    assert "Each one more costs 1 ms of a step (1.0%)" in found.verdict
    assert "64 joined as these are would train about 39 times as fast as one." in found.verdict


def test_the_verdict_names_the_fastest_batch_and_a_smaller_one_that_is_nearly_so():
    found = report(row(1, 32, 10.0), row(1, 64, 9.7), row(1, 128, 5.0))
    assert found.verdict == (
        "A per-replica batch of 128 is the fastest on one device, 640 examples/s, and 64 gives 97% "
        "of that."
    )
    assert "a per-replica batch of 32." in report(row(1, 32, 10.0)).verdict


def test_figures_of_a_machine_with_other_work_are_doubted():
    steady = report(row(1, 32, 10.0), row(1, 64, 9.0, machine_speed=90.0))
    slowed = report(row(1, 32, 10.0), row(1, 64, 9.0, machine_speed=60.0))
    shaken = report(row(1, 32, 10.0, quartiles=(7.0, 11.0)))
    assert "varied" not in steady.verdict
    assert "the machine itself varied by 40% meanwhile" in slowed.verdict
    assert "the machine itself varied by 40% meanwhile" in shaken.verdict


def ended(code, *said, stderr=""):
    lines = "".join(f"{_bench_child.SIGN}{json.dumps(one)}\n" for one in said)
    return _program.Ended(code, 1.0, lines, stderr)


def judged(what):
    return _bench._judged(BenchRow(1, 32, "failed"), what, 9.0)


def test_rounds_give_their_median_and_quartiles():
    said = {
        "result": "measured",
        "per_replica_batch_size": 32,
        "seconds_of_steps": [0.5, 0.25, 0.2, 0.1, 1.0],
        "peak_memory_gib": 1.0,
        "memory_of": "process",
        "machine_speed": 1.0,
        "where": "1 replica on CPU:0",
    }
    found = judged(ended(0, said))
    assert (found.steps_per_second, found.quartiles) == (4.0, (2.0, 5.0))
    once = judged(ended(0, said | {"seconds_of_steps": [0.5]}))
    assert (once.steps_per_second, once.quartiles) == (2.0, (2.0, 2.0))


@pytest.mark.parametrize(
    ("what", "result", "reason"),
    [
        (ended(None), "timed out", "did not end within 9 s"),
        (ended(137), "out of memory", "It was ended by SIGKILL. Most likely memory ran out"),
        (ended(134, stderr="std::bad_alloc\n"), "out of memory", "SIGABRT: std::bad_alloc"),
        (ended(139), "failed", "It was ended by SIGSEGV"),
        (ended(1, stderr="no such thing\n"), "failed", "exit code 1: no such thing"),
        (ended(1, {"result": "cannot", "reason": "No."}), "cannot", "No."),
        (ended(1, {"result": "out of memory", "reason": "O."}), "out of memory", "O."),
    ],
)
def test_what_is_not_measured_is_a_row_with_its_reason(what, result, reason):
    found = judged(what)
    assert found.result == result
    assert reason in found.reason
    shown = report(row(1, 16, 1.0), found)
    assert shown.works == (result in ("cannot", "out of memory"))
    assert max(map(len, str(shown).splitlines())) <= 80
    assert json.loads(json.dumps(shown.to_dict()))["rows"][1]["examples_per_second"] is None


def test_where_nothing_is_measured_nothing_works():
    nothing = report(judged(ended(1, {"result": "cannot", "reason": "No."})))
    assert not nothing.works
    assert nothing.verdict == "Nothing could be measured."


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError("Unable to allocate"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error, is_memory, monkeypatch, capsys):
    def raises(_):
        raise error

    monkeypatch.setattr(_bench_child, "_measured", raises)
    monkeypatch.setattr(_bench_child, "_be_ended_first", lambda: None)
    assert _bench_child.run(ORDER) == 1
    said = json.loads(capsys.readouterr().out.partition(_bench_child.SIGN)[2])
    assert said["result"] == ("out of memory" if is_memory else "failed")


@pytest.mark.parametrize(("gpus", "counts"), [(0, [2]), (1, []), (2, [2]), (6, [2, 4, 6])])
def test_without_a_number_replicas_go_up_to_all_gpus(gpus, counts, monkeypatch):
    monkeypatch.setattr("kdpkit._cpu_threads.cores", lambda: 8)
    measuring = _bench._Measuring({}, "jax", 1.0, print)
    measuring.accelerators = gpus
    assert measuring._all_counts() == counts


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replicas": 0}, "`replicas` must be a positive integer"),
        ({"replicas": []}, "`replicas` must be a positive integer or several"),
        ({"per_replica_batch_size": "32"}, "`per_replica_batch_size` must be a positive"),
        ({"global_batch_size": 100, "replicas": [3]}, "nearest sizes that work are 99 and 102"),
        ({"global_batch_size": 8, "per_replica_batch_size": 8}, "weak scaling"),
        ({"seconds": 0}, "`seconds` must be above 0"),
        ({"rounds": 0}, "`rounds` must be a positive integer"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds` must be a finite number"),
        ({"jit": "yes"}, "`jit` must be one of True, False, 'measure'"),
        ({"backend": "torch"}, "`backend` must be one of 'tensorflow', 'jax'"),
        ({"workload": "gpt"}, "`workload` must be one of 'cnn', 'bert'"),
        ({"target": "train.py:make", "workload": "cnn"}, "a target or a workload"),
        ({"target": "train.py"}, "must be `file.py:name` or `module:name`"),
        ({"target": "nowhere.py:make"}, "There is no such file: nowhere.py"),
    ],
)
def test_bad_input_is_refused_before_a_process_starts(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnostics.bench(**settings, on_start=lambda _: pytest.fail("started"))


def test_large_figures_are_shortened():
    assert [_bench_text._number(value) for value in (9999.6, 999.9)] == ["10000", "1000"]
    assert _bench_text._number(0.00049) == "5e-04"
    assert _bench_text._short(999_999.0) == "1M"
    wide = dataclasses.replace(row(8, 4096, 123456.7), quartiles=(123456.0, 234567.0))
    assert max(map(len, str(report(wide)).splitlines())) <= 80
