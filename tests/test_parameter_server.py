"""Asynchronous training through parameter servers: what is exact, and what may be killed.

Chief, workers and servers are real processes, and nothing waits without a limit.
"""

import dataclasses
import json
import os
import random
import re
import shlex
import signal
import socket
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdpkit import cluster as cluster_module
from kdpkit import launch, strategies
from kdpkit.strategies import _parameter_servers
from tests import parameter_server_process as program
from tests.processes import ROOT, Process, wait_for_file

pytestmark = [pytest.mark.timeout(2400), pytest.mark.tensorflow]


class Cluster:
    """Two workers and a parameter server, and chiefs one after the other."""

    def __init__(self):
        tasks = launch.tasks([sys.executable], workers=2, parameter_servers=1)
        self._tasks = {task.name: task for task in tasks}
        self._started = []
        self.servers = {}
        for name in ("worker 0", "worker 1", "ps 0"):
            self.start(name)

    def _start(self, config, runs=()):
        program = [sys.executable, "-m", "tests.parameter_server_process", json.dumps(runs)]
        self._started.append(Process(*program, **config.to_environment()))
        return self._started[-1]

    def start(self, name):
        self.servers[name] = self._start(self._tasks[name].config)

    def chief(self, *runs, workers=2):
        """Start a chief that knows some of the workers, for some runs."""
        config = self._tasks["chief"].config
        return self._start(dataclasses.replace(config, workers=config.workers[:workers]), runs)

    def end(self):
        for process in self._started:
            process.kill()


def result(chief, number=0):
    """Wait for what came out of a run."""
    chief.wait_for('"iterations":', count=number + 1)
    return json.loads([line for line in chief.lines if line.startswith("{")][number])


@pytest.fixture
def cluster():
    made = Cluster()
    try:
        yield made
    finally:
        made.end()


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        for left, right in zip(*map(keras.tree.flatten, (one[name], other[name])), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=name)


# Processes that train, and are killed. Each takes seconds to start, so that they do it in a row.

SLOW = 8  # products of matrices in a step, which then lasts long enough to be interrupted
INVALID = [
    "XLA compiles no step.*jit=True",
    "The scale of the loss depends.*LossScaleOptimizer",
    "cannot collect the gradients.*steps=2.*accumulation=",
    "`train` is a function.*steps_per_epoch=None",
    "made on the chief.*uses=.'variant'.",
    "must make a `tf.data.Dataset`.*made='ndarray'",
    "gave no batch. Give every worker some data",
]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_trains_exactly_and_outlives_its_chief_and_its_workers(cluster, tmp_path):
    file, state, until = str(tmp_path / "model.keras"), str(tmp_path / "state"), tmp_path / "until"
    resumable = {"directory": state, "seconds": 2.0}
    runs = [("classifier", {"model_file": file}), ("invalid", {}), ("classifier", resumable)]
    chief = cluster.chief(*runs, workers=1)
    assert_is_what_one_device_trains(result(chief), file)
    for printed, sentence in zip(result(chief, 1)["printed"], INVALID, strict=True):
        assert re.search(sentence, printed), printed

    # The chief is killed, in the last of these runs, and another goes on, with one more worker.
    chief.wait_for("step ", count=6 + random.randint(1, 2))
    time.sleep(random.uniform(0, 1.5))
    chief.kill()
    endless = {"products": SLOW, "epochs": 10_000, "until": str(until)}
    chief = cluster.chief(("classifier", resumable), ("slope", {}), ("slope", endless))
    resumed = result(chief)
    assert 1 <= len(resumed["seen"]) <= 6  # calls that were left of the six
    assert resumed["seen"][-1] == [8, 24]
    assert resumed["iterations"] == 24
    assert resumed["history"]["examples"] == [program.EXAMPLES] * 3

    slope = result(chief, 1)
    assert slope["seen"] == [[25, 25], [50, 50], [25, 75], [50, 100]]
    assert slope["examples"] == [400, 400]
    rates = [0.05 * (1 - step / 100) for step in range(100)]
    assert slope["weight"] == pytest.approx(-sum(rates), rel=1e-5)  # each update at its own rate

    # A worker is killed, comes back while the other trains, is killed again, and stays away.
    kill_in_a_step(cluster, chief)
    cluster.start("worker 1")
    cluster.servers["worker 1"].wait_for("reads a batch", count=20)
    kill_in_a_step(cluster, chief)
    until.touch()
    assert_every_step_counts_once(result(chief, 2))
    assert chief.end() == 0, chief.shown


def kill_in_a_step(cluster, chief):
    """Kill a worker in a step of the current run, and see that the other goes on."""
    chief.wait_for("step ", count=chief.count("step ") + 1)
    time.sleep(random.uniform(0, 1))
    cluster.servers["worker 1"].kill()
    chief.wait_for("step ", count=chief.count("step ") + 2)


def assert_is_what_one_device_trains(found, file):
    expected = program.train_classifier(strategies.select_strategy("one"))
    expected = json.loads(json.dumps(expected, default=float))
    assert_close(found, expected)
    assert found["iterations"] == 24
    own = {"Falling": program.Falling, "Examples": program.Examples}
    saved = keras.models.load_model(file, custom_objects=own)
    assert_close(
        {"weights": [weight.tolist() for weight in saved.get_weights()]},
        {"weights": expected["weights"]},
    )
    assert int(saved.optimizer.iterations.numpy()) == 24


def assert_every_step_counts_once(slope):
    """A step that was begun on a lost worker is made once more, and counts once."""
    steps = 25 * len(slope["seen"])
    assert slope["seen"] == [[25 + done % 50, 25 + done] for done in range(0, steps, 25)]
    assert slope["iterations"] == steps
    assert sum(slope["examples"]) == 8 * steps
    # An update that was under way is made once or, if it was not reported yet, twice.
    assert slope["weight"] == pytest.approx(-0.05 * steps, abs=5 * 0.05, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_recipe_goes_on_under_the_launcher_when_a_parameter_server_is_killed(tmp_path):
    results, state = tmp_path / "results.json", tmp_path / "state"
    recipe = shlex.join([sys.executable, str(ROOT / "recipes" / "parameter_server.py")])
    flags = f"--smoke --epochs 12 --steps-per-epoch 40 --results {results} --resume {state}"
    prints_its_end = f'echo "process $$"; {recipe} {flags}; code=$?; echo "code $code"; exit $code'
    command = ["launch", "--workers", "1", "--parameter-servers", "1", "--max-restarts", "1"]
    launcher = Process(sys.executable, "-m", "kdpkit", *command, "--", "sh", "-c", prints_its_end)
    try:
        launcher.wait_for("ps 0     | process")
        wait_for_file(state)
        while not [*state.glob("*")]:
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.5))
        os.killpg(int(printed_by("ps 0", launcher.lines, "process")[0]), signal.SIGKILL)
        code = launcher.end()
    finally:
        launcher.kill()  # its guard ends all that it started
    output = launcher.shown
    assert code == 0, output
    assert printed_by("chief", launcher.lines, "code") == ["43", "0"], output
    sentence = "A parameter server is gone (ps 0), and with it a part of the model. Start all"
    assert output.count(sentence) == 1, output
    assert "ps 0 was ended by SIGKILL, before any other" in output
    assert "All processes start again, on other ports (restart 1 of 1)." in output
    found = json.loads(results.read_text())
    assert found["strategy"] == "ParameterServerStrategy: 1 worker, 1 parameter server"
    assert (found["steps"], found["replicas"], found["global_batch_size"]) == (480, 1, 8)
    assert found["test"]["accuracy"] > 0.5


def printed_by(name, lines, word):
    """Return what follows a word in the lines of one process."""
    found = [re.fullmatch(rf"{name} *\| {word} (\d+)\n", line) for line in [*lines]]
    return [match[1] for match in found if match]


# Clusters that cannot work.


def set_cluster(monkeypatch, role="chief", **addresses):
    config = {"cluster": addresses, "task": {"type": role, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


COMPLETE = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}


def select():
    strategies.select_strategy("parameter_server")


@pytest.mark.parametrize(
    ("call", "missing", "role", "sentence"),
    [
        (select, "ps", "chief", "no parameter server to keep the model.*kdpkit launch"),
        (select, "worker", "chief", "Parameter servers need workers"),
        (select, "chief", "worker", "no chief to send the steps.*process of its own"),
        (select, None, "worker", "Only the chief has the strategy.*role='worker'.*serve_if_server"),
        (strategies.serve_if_server, "chief", "ps", "no chief"),
        (strategies.serve_if_server, None, "evaluator", "the chief evaluates.*role='evaluator'"),
    ],
)
def test_clusters_that_cannot_work_raise(monkeypatch, call, missing, role, sentence):
    set_cluster(monkeypatch, role, **{name: at for name, at in COMPLETE.items() if name != missing})
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_chief_does_not_hang(monkeypatch, capsys):
    monkeypatch.setattr(_parameter_servers, "_START_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(_parameter_servers, "_SILENT_SECONDS", 0.1)
    set_cluster(monkeypatch, **COMPLETE)
    with pytest.raises(ValueError, match="waited.*did not come.*'worker 0'.*'ps 0'.*serve_if"):
        strategies.select_strategy("parameter_server")
    assert capsys.readouterr().err == "The chief waits for worker 0, ps 0.\n"


def test_others_than_servers_go_on(monkeypatch):
    for text in ("", "{}"):
        monkeypatch.setenv("TF_CONFIG", text)
        strategies.serve_if_server()
    set_cluster(monkeypatch, **COMPLETE)
    strategies.serve_if_server()
    set_cluster(monkeypatch, "worker", worker=["localhost:2"])
    strategies.serve_if_server()


def slurm(task):
    """Return the cluster of a job with three tasks, the last of them a parameter server."""
    environ = {"SLURM_PROCID": str(task), "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "localhost"}
    environ |= {"SLURM_TASKS_PER_NODE": "3"}
    return cluster_module.ClusterConfig.from_environment(environ, parameter_servers=1)


def test_a_cluster_of_another_source_is_written_to_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")  # and back to what it was in the end
    strategies.serve_if_server(slurm(0))
    assert cluster_module.ClusterConfig.from_environment() == slurm(0)  # as the chief finds it


@pytest.mark.parametrize("is_passed", [False, True])
def test_a_server_at_a_taken_port_raises(monkeypatch, is_passed):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        set_cluster(monkeypatch, "ps", **COMPLETE | {"ps": [address]})
        config = dataclasses.replace(slurm(2), parameter_servers=[address]) if is_passed else None
        with pytest.raises(ValueError, match=f"ps 0 cannot serve at {address} .address already"):
            strategies.serve_if_server(config)


def test_a_call_that_tensorflow_cancels_is_made_again_while_servers_listen(monkeypatch):
    monkeypatch.setattr(_parameter_servers, "_PAUSE_SECONDS", 0.01)
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        set_cluster(monkeypatch, **COMPLETE | {"ps": [f"localhost:{server.getsockname()[1]}"]})
        listening = Addresses()
        for kind in (tf.errors.CancelledError, tf.errors.UnavailableError, tf.errors.AbortedError):
            assert _parameter_servers.insist(listening, failing(kind, times=3)) == "made"
        with pytest.raises(tf.errors.InvalidArgumentError):
            _parameter_servers.insist(listening, failing(tf.errors.InvalidArgumentError))
        printed = "From /job:ps/replica:0/task:0: Unable to find a context_id matching"
        with pytest.raises(tf.errors.AbortedError):  # another server is at the address
            _parameter_servers.insist(listening, failing(tf.errors.AbortedError, printed))
        monkeypatch.setattr(_parameter_servers, "_PATIENCE_SECONDS", 0.1)
        with pytest.raises(tf.errors.CancelledError):
            _parameter_servers.insist(listening, failing(tf.errors.CancelledError, times=1000))
    with pytest.raises(tf.errors.CancelledError):  # nothing listens any more
        _parameter_servers.insist(listening, failing(tf.errors.CancelledError))


class Addresses:
    """What is asked of a strategy here."""

    def __init__(self):
        self._cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()


def failing(kind, printed="RecvFromRemoteAsync is cancelled.", *, times=1):
    """Make a call that fails some times."""
    errors = [kind(None, None, printed)] * times

    def call():
        if errors:
            raise errors.pop()
        return "made"

    return call
