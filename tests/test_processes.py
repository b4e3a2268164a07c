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
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import errors
from kdpkit._internal import processes
from kdpkit._internal.processes import explain_lost_process
from kdpkit.sharding import join_processes
from tests.process_programs import assert_close
from tests.processes import SOON, Process, Together, free_port, once

RUNS = {
    "accumulating": {"accumulation": 2},
    "step": {"by": "step"},
    "generated": {"generated": True, "epochs": 1},
}
UNEVEN = [{}, {"examples": 48}]  # what differs between two processes
DISAGREE = {
    "uneven": {"own_data": UNEVEN},
    "uneven, generated": {"own_data": UNEVEN} | RUNS["generated"],
    "alike": {"own_data": [{"same_data": True}] * 2},
    "alike, step": {"by": "step", "own_data": [{"same_data": True}] * 2},
    "seed": {"seeds": [0, 1]},
    "seed, step": {"by": "step", "seeds": [0, 1]},
    "alone": {"groups_of": [0, 0]},
    "groups": {"groups_of": [4, 4]},
    "meshes": {"groups_of": [1, 2]},
}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.needs(jax="0.10", keras="3.15", reason="several processes are not supported"),
    pytest.mark.tensorflow,  # once: it starts processes on JAX
]


def together(count, *runs, flags="", **variables):
    shared = {"processes": count, "port": free_port(), "runs": runs, "flags": flags}
    program = [sys.executable, "-m", "tests.jax_process"]
    variables |= {"KERAS_BACKEND": "jax"}
    return Together(
        Process(*program, json.dumps(shared | {"index": i}), **variables) for i in range(count)
    )


def results(shown):
    return [json.loads(line)["found"] for line in shown.splitlines() if line[:8] == '{"found"']


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    def train():
        with together(1, *RUNS.values()) as started:
            assert started.end() == [0], started.shown
        return dict(zip(RUNS, results(started[0].shown), strict=True))

    return once(tmp_path_factory, "one process of JAX", train)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes train, or raise, by the name of the run, and how they end.

    In the last run the second one makes a mistake.
    """

    def train():
        sharded = {"monitors": True, "shard": "weights", "steps_per_execution": 3}
        runs = RUNS | {"accumulating": RUNS["accumulating"] | sharded}
        runs |= {name: run | {"raises": True} for name, run in DISAGREE.items()}
        with together(2, *runs.values(), {"fails_at": 2, "seeds": [0, 0]}) as started:
            ends = {"codes": started.end(), "shown": started.shown}
        found = map(results, started.shown)
        return ends | dict(zip(runs, zip(*found, strict=True), strict=True))

    return once(tmp_path_factory, "two processes of JAX", train)


# Equal to one process.


@pytest.mark.slow
@pytest.mark.parametrize("way", RUNS)
def test_two_processes_train_evaluate_and_predict_as_one(two, alone, way):
    first, second = two[way]
    if way == "accumulating":  # The first process alone logs what it monitors.
        of_first = first["history"].keys() - second["history"].keys()
        assert of_first >= {"process_memory_gib", "process_cpu_utilization"}
        for name in of_first:
            del first["history"][name]
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first, alone[way])


# What would hang JAX, or what it would not notice.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("uneven", "The number of batches of `x`, and their shapes, must be the same"),
        ("uneven, generated", "The number of batches, and their shapes, must be the same"),
        ("alike", "The first batch of `x` must differ between processes"),
        ("alike, step", "The first batch of a step must differ between processes"),
        ("seed", "A variable has not the same value in all processes"),
        ("seed, step", "A variable has not the same value in all processes"),
        ("alone", "each process would train a model of its own"),
        ("groups", "devices that share the model must be of one process"),
        ("meshes", "The devices of the distribution must be the same in all processes"),
    ],
)
def test_processes_that_disagree_raise(two, run, sentence):
    remedy = (
        r"as `kdpkit.batches.ArrayBatches` does|equally many|set_random_seed\(0\)|clear_session"
        "|the same in every process"
    )
    for found in two[run]:
        assert sentence in found
        assert re.search(remedy, found)


@pytest.mark.slow
def test_an_error_of_one_process_does_not_leave_the_other_waiting(two):
    assert two["codes"] == [43, 1], two["shown"]
    assert "Another process of this training is gone" in two["shown"][0]
    assert "a mistake of this process alone" in two["shown"][1]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_DATA and /proc")
def test_two_processes_load_train_and_save_a_model_that_fits_neither(tmp_path):
    ((expected,),) = with_memory(tmp_path, processes=1, mebibytes=0)
    alone = (tmp_path / "after-0.weights.h5").rename(tmp_path / "alone.weights.h5")
    assert with_memory(tmp_path, processes=1, mebibytes=850) == [[]]  # which is too little
    for (found,) in with_memory(tmp_path, processes=2, mebibytes=850):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with h5py.File(alone) as one, h5py.File(tmp_path / "after-1.weights.h5") as other:
        for left, right in zip(arrays_of(one["layers"]), arrays_of(other["layers"]), strict=True):
            np.testing.assert_allclose(left[:], right[:], rtol=0, atol=1e-8)  # a few last bits


def with_memory(directory, *, processes, mebibytes):
    flags = (  # as docs/how_to/shard_variables.md says
        "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED "
        "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
    )
    # Memory that was freed counts no longer: else the arenas of each thread keep some.
    frugal = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "100000"}
    run = {"mebibytes": mebibytes, "directory": str(directory)}
    with together(processes, run, flags=flags, **frugal) as started:
        started.end(SOON)
    return [results(shown) for shown in started.shown]


def arrays_of(group):
    for item in group.values():
        yield from arrays_of(item) if isinstance(item, h5py.Group) else [item]


# Ends.


@pytest.mark.slow
def test_a_killed_process_ends_the_other_soon_with_one_sentence():
    """tests/test_elastic.py has what follows: the run goes on, to the same weights."""
    with together(2, {"seconds_a_step": 0.2, "epochs": 100}) as started:
        started.wait_for("step 3")
        started[0].send(signal.SIGKILL)
        codes = started.end(SOON)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, 1)
    printed = started[1].shown.splitlines()[-1]
    assert "gone" in printed
    assert "its output has the reason. Start all processes again" in printed


JOINING = """
import sys
from kdpkit import experiment, sharding
port, index = map(int, sys.argv[1:])
settings = {"process_count": 2, "process_index": index, "start_timeout_seconds": 5}
experiment.run(lambda: sharding.join_processes(f"localhost:{port}", **settings))
"""


@pytest.mark.slow
def test_a_port_that_another_program_has_ends_the_first_process_and_no_other_waits_for_ever():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        program = [sys.executable, "-c", JOINING, port]
        with Together(Process(*program, i, KERAS_BACKEND="jax") for i in range(2)) as started:
            codes = started.end(SOON)
    assert codes[0] == 2
    assert codes[1] != 0
    first, second = (output.splitlines()[-1] for output in started.shown)
    assert f"cannot listen at port {port}" in first
    assert "Set another port for it in all processes" in first
    assert "1 of 2" in second
    assert "Check that all were started, with one address" in second


def test_processes_join_on_jax_alone():
    with pytest.raises(ValueError, match="`join_processes` does not work on.*'tensorflow'"):
        join_processes("localhost:9876", process_count=2, process_index=0)


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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        tf.errors.UnavailableError(None, None, "Collective ops is aborted by: a server"),
    ],
)
def test_what_a_process_alone_meets_is_not_blamed_on_others(error):
    with pytest.raises(type(error), match=str(error)), explain_lost_process():
        raise error
