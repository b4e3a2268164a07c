"""Asynchronous training through parameter servers: what is exact, and what may be killed.

Chief, workers and servers are real processes, and nothing waits without a limit.
"""

import dataclasses
import json
import random
import socket
import sys
import time
import types

import keras
import pytest
import tensorflow as tf

from kdpkit import strategies
from kdpkit.cluster import ClusterConfig
from kdpkit.strategies import _parameter_servers
from kdpkit.training.tensorflow import _servers
from tests import parameter_server_process as program
from tests.process_programs import assert_close
from tests.processes import Process, free_port

pytestmark = [pytest.mark.timeout(2400), pytest.mark.tensorflow]


class Cluster:
    """Two workers and a parameter server, and chiefs one after the other."""

    def __init__(self):
        chief, *workers, server = (f"localhost:{free_port()}" for _ in range(4))
        self.config = ClusterConfig(workers, chief=chief, parameter_servers=[server])
        self._started = []
        self.servers = {}
        for role, index in (("worker", 0), ("worker", 1), ("ps", 0)):
            self.start(role, index)

    def _start(self, runs=(), **position):
        config = dataclasses.replace(self.config, **position)
        program = [sys.executable, "-m", "tests.parameter_server_process", json.dumps(runs)]
        self._started.append(Process(*program, **config.to_environment()))
        return self._started[-1]

    def start(self, role, index):
        self.servers[role, index] = self._start(role=role, index=index)

    def chief(self, *runs, workers=2):
        return self._start(runs, role="chief", workers=self.config.workers[:workers])

    def end(self):
        for process in self._started:
            process.kill()


def result(chief, number=0):
    chief.wait_for('"iterations":', count=number + 1)
    return json.loads([line for line in chief.lines if line.startswith("{")][number])


@pytest.fixture
def cluster():
    made = Cluster()
    try:
        yield made
    finally:
        made.end()


# Processes that train, and are killed. Each takes seconds to start, so that they do it in a row.

SLOW = 8  # products of matrices in a step, which then lasts long enough to be interrupted


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_trains_exactly_and_outlives_its_chief_and_its_workers(cluster, tmp_path):
    state, until = str(tmp_path / "state"), tmp_path / "until"
    resumable = {"directory": state, "seconds": 2.0}
    chief = cluster.chief(("classifier", {}), ("own", {}), ("classifier", resumable), workers=1)
    one = strategies.select_strategy("one")
    for run, train in enumerate((program.train_classifier, program.train_own)):
        assert_close(result(chief, run), json.loads(json.dumps(train(one), default=float)))
    assert result(chief)["iterations"] == 24

    # The chief is killed, in the last of these runs, and another goes on, with one more worker.
    chief.wait_for("step ", count=6 + random.randint(1, 2))
    time.sleep(random.uniform(0, 1.5))
    chief.kill()
    endless = {"products": SLOW, "epochs": 10_000}
    until_then = ("slope", endless | {"until": str(until)})
    chief = cluster.chief(("classifier", resumable), ("slope", {}), until_then, ("slope", endless))
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
    cluster.start("worker", 1)
    cluster.servers["worker", 1].wait_for("takes a step", count=20)
    kill_in_a_step(cluster, chief)
    until.touch()
    assert_every_step_counts_once(result(chief, 2))

    # A parameter server is killed, which is the end.
    chief.wait_for("step ", count=chief.count("step ") + 1)
    cluster.servers["ps", 0].kill()
    assert chief.end() == 43, chief.shown
    sentence = "A parameter server is gone (ps 0), and with it a part of the model. Start all"
    assert chief.count(sentence) == 1
    assert "Traceback" not in chief.shown


def kill_in_a_step(cluster, chief):
    chief.wait_for("step ", count=chief.count("step ") + 1)
    time.sleep(random.uniform(0, 1))
    cluster.servers["worker", 1].kill()
    chief.wait_for("step ", count=chief.count("step ") + 2)


def assert_every_step_counts_once(slope):
    """A step that was begun on a lost worker is made once more, and counts once."""
    steps = 25 * len(slope["seen"])
    assert slope["seen"] == [[25 + done % 50, 25 + done] for done in range(0, steps, 25)]
    assert slope["iterations"] == steps
    assert sum(slope["examples"]) == 8 * steps
    # An update that was under way is made once or, if it was not reported yet, twice.
    assert slope["weight"] == pytest.approx(-0.05 * steps, abs=5 * 0.05, rel=0.01)


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
        (select, "ps", "chief", "needs a chief.*a parameter server.*kdpkit launch"),
        (select, "worker", "chief", "A cluster needs a worker"),
        (select, None, "worker", "Only the chief has the strategy.*role='worker'.*serve_if_server"),
        (strategies.serve_if_server, "chief", "ps", "needs a chief.*chief=None"),
    ],
)
def test_clusters_that_cannot_work_raise(monkeypatch, call, missing, role, sentence):
    addresses = {name: [f"localhost:{free_port()}"] for name in COMPLETE if name != missing}
    set_cluster(monkeypatch, role, **addresses)
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.optimizers.SGD(gradient_accumulation_steps=2),
    ],
)
def test_optimizers_that_decide_from_several_updates_raise(optimizer):
    with pytest.raises(ValueError, match="neither scale the loss nor collect"):
        _servers.reject_waiting_for_others(optimizer)


def test_a_chief_does_not_hang(monkeypatch):
    monkeypatch.setattr(_parameter_servers, "_START_TIMEOUT_SECONDS", 0.5)
    set_cluster(monkeypatch, **COMPLETE | {"chief": [f"localhost:{free_port()}"]})
    with pytest.raises(ValueError, match="waited.*did not come.*'worker 0'.*'ps 0'.*serve_if"):
        select()


def test_others_than_servers_go_on(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    strategies.serve_if_server()
    set_cluster(monkeypatch, **COMPLETE)
    strategies.serve_if_server()
    set_cluster(monkeypatch, "worker", worker=["localhost:2"])
    strategies.serve_if_server()


def test_a_server_at_a_taken_port_raises(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        set_cluster(monkeypatch, "ps", **COMPLETE | {"ps": [address]})
        with pytest.raises(ValueError, match=f"cannot listen at port .*Address already.*{address}"):
            strategies.serve_if_server()


def test_a_call_that_tensorflow_cancels_is_made_again_while_servers_listen(monkeypatch):
    monkeypatch.setattr(_parameter_servers, "_PAUSE_SECONDS", 0.01)
    with socket.create_server(("localhost", 0)) as server:
        set_cluster(monkeypatch, **COMPLETE | {"ps": [f"localhost:{server.getsockname()[1]}"]})
        cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        listening = types.SimpleNamespace(_cluster_resolver=cluster)
        for kind in (tf.errors.CancelledError, tf.errors.UnavailableError, tf.errors.AbortedError):
            assert _parameter_servers.insist(listening, failing(kind, times=3)) == "made"
        printed = "From /job:ps/replica:0/task:0: Unable to find a context_id matching"
        with pytest.raises(tf.errors.AbortedError):  # another server is at the address
            _parameter_servers.insist(listening, failing(tf.errors.AbortedError, printed))
    with pytest.raises(tf.errors.CancelledError):  # nothing listens any more
        _parameter_servers.insist(listening, failing(tf.errors.CancelledError))


def failing(kind, printed="RecvFromRemoteAsync is cancelled.", *, times=1):
    errors = [kind(None, None, printed)] * times

    def call():
        if errors:
            raise errors.pop()
        return "made"

    return call
