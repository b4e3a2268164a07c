"""Several processes of `jax.distributed` on one machine: equal to one, and never without an answer.

Each is a real process, and every test has a time limit of its own. Starting JAX is what costs, so
two processes make all runs that leave them alive.
"""

import json
import re
import signal
import socket
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import processes
from kdpkit._internal.processes import explain_lost_process
from kdpkit.sharding import join_processes
from tests.processes import SOON, Process, Together, free_port, once

RUNS = {
    "loop": {"by": "loop"},
    "fit": {"by": "fit"},
    "micro-batches": {"loop": {"accumulation": 2}},
}
LONGER = {
    "4 epochs, loop": {"by": "loop", "epochs": 4},
    "4 epochs, fit": {"by": "fit", "epochs": 4},
}
UNEVEN = [{}, {"examples": 48}]  # what differs between two processes
ALIKE = [{"same_data": True}] * 2
DISAGREE = {
    "uneven, loop": {"by": "loop", "own_data": UNEVEN},
    "uneven, fit": {"by": "fit", "own_data": UNEVEN},
    "alike, loop": {"by": "loop", "own_data": ALIKE},
    "alike, fit": {"by": "fit", "own_data": ALIKE},
    "end, loop": {"by": "loop", "own_data": UNEVEN, "data": {"unknown_length": True}},
    "seed, fit": {"by": "fit", "seeds": [0, 1]},
}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.needs(jax="0.10", keras="3.15", reason="several processes are not supported"),
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="starts processes on JAX; once is enough"
    ),
]


def together(count, *runs, indices=None, **settings):
    """Start tests/jax_process.py as so many processes, or only some of them."""
    shared = {"processes": count, "port": free_port(), "runs": runs} | settings
    program = [sys.executable, "-m", "tests.jax_process"]
    return Together(
        Process(*program, json.dumps(shared | {"index": i}), KERAS_BACKEND="jax")
        for i in indices or range(count)
    )


def results(count, *runs):
    """Return what came out of each run, for each process."""
    with together(count, *runs) as started:
        assert {*started.end()} == {0}, started.shown
    return [
        [json.loads(line)["found"] for line in output.splitlines() if line.startswith('{"found"')]
        for output in started.shown
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process trains, by the name of the run."""

    def train():
        runs = RUNS | LONGER
        (found,) = results(1, *runs.values())
        return dict(zip(runs, found, strict=True))

    return once(tmp_path_factory, "one process of JAX", train)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes train, or raise, by the name of the run."""

    def train():
        runs = RUNS | {
            "3 steps in a call": {"loop": {"steps_per_loop": 3}},
            "monitors": {"monitors": True},
            "weights cut, loop": {"by": "loop", "loop": {"shard": "weights"}},
            "weights cut, fit": {"by": "fit", "loop": {"shard": "weights"}},
            "optimizer cut, fit": {"by": "fit", "loop": {"shard": "optimizer"}},
        }
        runs |= {name: run | {"raises": True} for name, run in DISAGREE.items()}
        return dict(zip(runs, zip(*results(2, *runs.values()), strict=True), strict=True))

    return once(tmp_path_factory, "two processes of JAX", train)


def assert_close(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name in one:
        for left, right in zip(*map(keras.tree.flatten, (one[name], other[name])), strict=True):
            np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)


# Equal to one process.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "as_one"),
    [
        ("loop", "loop"),
        ("fit", "fit"),
        ("micro-batches", "micro-batches"),
        ("3 steps in a call", "loop"),
        ("weights cut, loop", "loop"),
        ("weights cut, fit", "fit"),
        ("optimizer cut, fit", "fit"),
    ],
)
def test_two_processes_train_evaluate_and_predict_as_one(two, alone, way, as_one):
    first, second = two[way]
    assert_close(first, second, tolerance=0)
    assert_close(first, alone[as_one])


@pytest.mark.slow
def test_the_first_of_two_processes_logs_its_devices(two):
    first, second = (found["history"] for found in two["monitors"])
    assert first["memory_gib"][0] > 0.05
    assert len(first["cpu_utilization"]) == len(first["loss"])
    assert {"loss"} <= second.keys()
    assert not {"memory_gib", "cpu_utilization"} & second.keys()


@pytest.mark.slow
def test_the_recipe_trains_in_two_processes(tmp_path):
    results_file = tmp_path / "results.json"
    flags = ["--smoke", "--results", results_file, "--log-dir", tmp_path / "logs"]
    flags += ["--processes", "2", "--coordinator", f"localhost:{free_port()}", "--process"]
    command = [sys.executable, "recipes/cnn_jax.py", *flags]
    with Together(Process(*command, index, KERAS_BACKEND="jax") for index in range(2)) as started:
        assert started.end() == [0, 0], started.shown
    assert ["Test:" in output for output in started.shown] == [True, False]
    found = json.loads(results_file.read_text())
    assert (found["replicas"], found["global_batch_size"], found["steps"]) == (2, 16, 8)
    assert [path.name for path in (tmp_path / "logs").glob("*.keras")] == ["model.keras"]


# What would hang JAX, or what it would not notice.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("uneven, loop", "The number of batches of `train`, and their shapes, must be the same"),
        ("uneven, fit", "The number of batches of `x`, and their shapes, must be the same"),
        ("alike, loop", "The first batch of `train` must differ between processes"),
        ("alike, fit", "The first batch of `x` must differ between processes"),
        ("end, loop", "The number of batches of `train` must be the same in all processes"),
    ],
)
def test_processes_that_disagree_raise(two, run, sentence):
    for found in two[run]:
        assert sentence in found
        assert re.search("as `kdpkit.batches.ArrayBatches` does|equally many", found)


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_models_that_processes_draw_differently_raise(two):
    for found in two["seed, fit"]:
        assert "A variable has not the same value in all processes" in found
        assert "keras.utils.set_random_seed(0)" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "first", "then"),
    [("fit", 2, 1), pytest.param("loop", 1, 2, marks=pytest.mark.exhaustive)],
)
def test_cut_variables_of_several_processes_are_saved_and_loaded(tmp_path, alone, by, first, then):
    of_two = {"by": by, "directory": str(tmp_path), "loop": {"shard": "weights"}}
    of_one = {"by": by, "directory": str(tmp_path)}
    results(first, (of_two if first == 2 else of_one) | {"epochs": 2})
    found = results(then, (of_two if then == 2 else of_one) | {"epochs": 4})
    for (resumed,) in found:
        assert_close(resumed, alone[f"4 epochs, {by}"])
    with h5py.File(tmp_path / "model.weights.h5") as file:
        saved = [np.array(value) for value in arrays_of(file)]
    weights = [np.asarray(value, "float32") for value in found[0][0]["weights"]]
    assert {value.tobytes() for value in weights if value.ndim == 2} <= {
        value.tobytes() for value in saved
    }


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_DATA and /proc")
def test_two_processes_load_train_and_save_a_model_that_fits_neither(tmp_path):
    (of_one,) = with_memory(tmp_path, processes=1, mebibytes=0)
    alone = (tmp_path / "after-0.weights.h5").rename(tmp_path / "alone.weights.h5")
    (too_large,) = with_memory(tmp_path, processes=1, mebibytes=850)
    assert "losses [" not in too_large
    for output in with_memory(tmp_path, processes=2, mebibytes=850):
        losses = [re.findall(r"losses \[(.+)\]", text)[0].split(", ") for text in (output, of_one)]
        np.testing.assert_allclose(*(np.array(found, float) for found in losses), rtol=1e-5)
    with h5py.File(alone) as one, h5py.File(tmp_path / "after-1.weights.h5") as other:
        for left, right in zip(arrays_of(one["layers"]), arrays_of(other["layers"]), strict=True):
            np.testing.assert_allclose(left[:], right[:], rtol=0, atol=1e-8)  # a few last bits


def with_memory(directory, *, processes, mebibytes):
    """Return what tests/large_model_process.py writes in each process."""
    port = free_port()
    # Memory that was freed counts no longer: else the arenas of each thread keep some.
    frugal = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "100000"}
    program = [sys.executable, "-m", "tests.large_model_process"]
    arguments = [[processes, i, port, directory, mebibytes] for i in range(processes)]
    with Together(Process(*program, *of_one, **frugal) for of_one in arguments) as started:
        started.end(SOON)
    return started.shown


def arrays_of(group):
    for item in group.values():
        yield from arrays_of(item) if isinstance(item, h5py.Group) else [item]


# Ends.


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_process_ends_all_soon_and_the_run_goes_on(tmp_path, alone, victim):
    run = {"epochs": 4, "directory": str(tmp_path)}
    with together(2, run | {"seconds_a_step": 0.2}) as started:
        started[0].wait_for("step 3")
        started[0].wait_for("step 2", count=2)
        started[victim].send(signal.SIGKILL)
        codes = started.end(SOON)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] not in (0, 1)
    printed = started[1 - victim].shown.splitlines()[-1]
    assert "gone" in printed
    assert "its output has the reason. Start all processes again" in printed
    (resumed,), _ = results(2, run)
    assert_close(resumed, alone["4 epochs, loop"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_lost_before_training_ends_the_other_with_one_sentence(victim, number):
    with together(2, waits=True) as started:
        started.wait_for("joined")
        started[victim].send(number)
        assert started[1 - victim].end(SOON) == -signal.SIGABRT  # JAX ends it
    assert "gone: its output has the reason. Start all" in started[1 - victim].shown


@pytest.mark.slow
@pytest.mark.parametrize("by", ["loop", pytest.param("fit", marks=pytest.mark.exhaustive)])
def test_sigterm_to_one_saves_and_ends_all_at_one_step(tmp_path, alone, by):
    run = {"epochs": 4, "directory": str(tmp_path), "by": by}
    with together(2, run | {"seconds_a_step": 0.2}) as started:
        started[0].wait_for("step 1")
        started[1].send(signal.SIGTERM)
        assert started.end(SOON) == [42, 42], started.shown
    for output in started.shown:
        assert "Training was stopped by SIGTERM. Its state is in" in output
        assert "Traceback" not in output
    (resumed,), _ = results(2, run)
    assert_close(resumed, alone[f"4 epochs, {by}"])


@pytest.mark.slow
def test_an_error_of_one_process_does_not_leave_the_other_waiting():
    with together(2, {"fails_at": 2}) as started:
        assert started.end() == [43, 1], started.shown
    assert "Another process of this training is gone" in started[0].shown
    assert "a mistake of this process alone" in started[1].shown


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_port_that_another_program_has_is_named_by_every_process(first):
    """Also by one that cannot try it, being another: `first` is whether the first one is there."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with together(2, indices=None if first else [1], port=port) as started:
            assert {*started.end()} == {2}, started.shown
    for output in started.shown:
        assert f"cannot listen at port {port}" in output
        assert "Set another port for all processes" in output
        assert "Traceback" not in output


@pytest.mark.slow
def test_a_process_that_does_not_come_does_not_hang_the_others():
    joining = {"start_timeout_seconds": 5}
    with (
        together(2, indices=[0], joining=joining) as first,
        together(2, indices=[1], joining=joining) as second,
    ):
        codes = first.end(SOON) + second.end(SOON)
    assert 0 not in codes
    for index, shown in enumerate(first.shown + second.shown):
        printed = shown.splitlines()[-1]
        assert f"{index} of 2" in printed
        assert "Check that all were started, with one address" in printed


def test_processes_join_on_jax_alone():
    with pytest.raises(ValueError, match="Processes join like this on JAX.*'tensorflow'"):
        join_processes("localhost:9876", process_count=2, process_index=0)


def test_what_a_process_alone_cannot_reach_is_no_other_process():
    error = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: a server")
    with pytest.raises(tf.errors.UnavailableError), explain_lost_process():
        raise error


def test_a_loss_that_jax_raises_as_a_value_error_is_named(monkeypatch):
    monkeypatch.setattr(processes, "_exit_codes", [])  # this process ends as usual
    error = ValueError(
        "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error "
        "[10.77.0.2]:31923: Connection reset by peer"
    )
    with (
        pytest.raises(errors.ProcessLostError, match="Connection reset by peer"),
        explain_lost_process(),
    ):
        raise error


def test_what_went_wrong_here_is_not_blamed_on_others():
    with (
        pytest.raises(RuntimeError, match="^out of memory$"),
        explain_lost_process(),
    ):
        raise RuntimeError("out of memory")
