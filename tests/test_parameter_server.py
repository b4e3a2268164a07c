"""Asynchronous training through parameter servers: one worker is exact, and all steps count.

Chief, workers and servers are real processes, and every test has a time limit of its own. Servers
outlive a chief, so that most tests share them.
"""

import dataclasses
import io
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

import kdpkit
from kdpkit import _servers, launch, strategies
from kdpkit import cluster as cluster_module
from tests import parameter_server_process as program

ROOT = pathlib.Path(kdpkit.__file__).parent.parent

pytestmark = [pytest.mark.timeout(600), pytest.mark.tensorflow]


class Process:
    """A process whose output is read as it comes."""

    def __init__(self, task, runs=()):
        self._task = task
        self._runs = runs
        self.lines = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parameter_server_process", json.dumps(runs)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | dict(task.variables) | {"PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line)

    def wait_for(self, text, count=1, seconds=400):
        deadline = time.monotonic() + seconds
        while sum(text in line for line in [*self.lines]) < count:
            if self._process.poll() is not None:
                self._reader.join(timeout=10)
                assert sum(text in line for line in self.lines) >= count, "".join(self.lines)
                return
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.02)

    def end(self, seconds=400):
        """Wait for its end; give the exit code and what it wrote."""
        code = self._process.wait(timeout=seconds)
        self._reader.join(timeout=10)
        return code, "".join(self.lines)

    def result(self, number=0):
        """Wait for what came out of a run."""
        self.wait_for('"iterations":', count=number + 1)
        return json.loads([line for line in self.lines if line.startswith("{")][number])

    def kill(self):
        self._process.kill()
        self.end()

    def again(self):
        return type(self)(self._task, self._runs)


class Cluster:
    """Two workers and a parameter server, and chiefs one after the other."""

    def __init__(self):
        self._tasks = {
            task.name: task
            for task in launch.plan([sys.executable], workers=2, parameter_servers=1)
        }
        names = [name for name in self._tasks if name != "chief"]
        self.servers = {name: Process(self._tasks[name]) for name in names}
        self._chiefs = []

    def chief(self, *runs, workers=2):
        """Start a chief that knows some of the workers, for some runs."""
        for former in self._chiefs:
            former.kill()  # gRPC lets two listen at one address
        task = self._tasks["chief"]
        config = dataclasses.replace(task.config, workers=task.config.workers[:workers])
        task = dataclasses.replace(task, variables=config.to_environment())
        self._chiefs.append(Process(task, runs))
        return self._chiefs[-1]

    def end(self):
        for process in [*self._chiefs, *self.servers.values()]:
            process.kill()


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.end()


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        for left, right in zip(*map(keras.tree.flatten, (one[name], other[name])), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=name)


# Exact, though asynchronous.


@pytest.mark.slow
def test_one_worker_trains_what_one_device_trains(cluster, tmp_path):
    file = str(tmp_path / "model.keras")
    chief = cluster.chief(("classifier", {"model_file": file}), workers=1)
    expected = program.train_classifier(strategies.select_strategy("one"))
    expected = json.loads(json.dumps(expected, default=float))
    found = chief.result()
    assert_close(found, expected)
    assert found["iterations"] == 24
    own = {"Falling": program.Falling, "Rows": program.Rows}
    saved = keras.models.load_model(file, custom_objects=own)
    assert_close(
        {"weights": [weight.tolist() for weight in saved.get_weights()]},
        {"weights": expected["weights"]},
    )
    assert int(saved.optimizer.iterations.numpy()) == 24

    assert chief.end()[0] == 0


@pytest.mark.slow
def test_what_cannot_be_exact_is_refused(cluster):
    chief = cluster.chief(("refused", {}), workers=1)
    sentences = [
        "XLA compiles no step.*jit=True",
        "The scale of the loss depends.*LossScaleOptimizer",
        "cannot collect the gradients.*steps=2.*accumulation=",
        "`train` is a function.*steps_per_epoch=None",
        "made on the chief.*uses=.'variant'.",
        "must make a `tf.data.Dataset`.*made='ndarray'",
        "gave no batch. Give every worker some data",
    ]
    for said, sentence in zip(chief.result()["said"], sentences, strict=True):
        assert re.search(sentence, said), said


@pytest.mark.slow
def test_the_recipe_trains_under_the_launcher(tmp_path):
    results = tmp_path / "results.json"
    flags = ["--smoke", "--steps-per-epoch", "40", "--results", str(results)]
    command = [sys.executable, str(ROOT / "recipes" / "parameter_server.py"), *flags]
    report = launch.run(command, workers=2, parameter_servers=1, stdout=io.StringIO())
    assert report.exit_code == 0, report
    found = json.loads(results.read_text())
    assert found["strategy"] == "ParameterServerStrategy: 2 workers, 1 parameter server"
    assert (found["steps"], found["replicas"], found["global_batch_size"]) == (80, 1, 8)
    assert found["test"]["accuracy"] > 0.3


# Clusters that cannot work.


def place(monkeypatch, role="chief", **addresses):
    config = {"cluster": addresses, "task": {"type": role, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


WHOLE = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}


@pytest.mark.parametrize(
    ("missing", "role", "sentence"),
    [
        ("ps", "chief", "no parameter server to keep the model.*kdpkit launch"),
        ("worker", "chief", "Parameter servers need workers"),
        ("chief", "worker", "no chief to send the steps.*process of its own"),
        (None, "worker", "The chief alone has the strategy.*role='worker'.*serve_if_server"),
    ],
)
def test_clusters_that_cannot_work_are_refused(monkeypatch, missing, role, sentence):
    place(monkeypatch, role, **{name: at for name, at in WHOLE.items() if name != missing})
    with pytest.raises(ValueError, match=sentence):
        strategies.select_strategy("parameter_server")


def test_a_chief_does_not_wait_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(_servers, "_START_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(_servers, "_SILENT_SECONDS", 0.1)
    place(monkeypatch, **WHOLE)
    with pytest.raises(ValueError, match="waited.*did not come.*'worker 0'.*'ps 0'.*serve_if"):
        strategies.select_strategy("parameter_server")
    assert capsys.readouterr().err == "The chief waits for worker 0, ps 0.\n"


def test_others_than_servers_go_on(monkeypatch):
    for text in ("", "{}"):
        monkeypatch.setenv("TF_CONFIG", text)
        strategies.serve_if_server()
    place(monkeypatch, **WHOLE)
    strategies.serve_if_server()
    place(monkeypatch, "worker", worker=["localhost:2"])
    strategies.serve_if_server()


def test_a_server_at_a_taken_port_says_so(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        place(monkeypatch, "ps", **WHOLE | {"ps": [address]})
        with pytest.raises(ValueError, match=f"ps 0 cannot serve at {address} .address already"):
            strategies.serve_if_server()


def test_a_server_needs_a_chief(monkeypatch):
    place(monkeypatch, "ps", **{name: at for name, at in WHOLE.items() if name != "chief"})
    with pytest.raises(ValueError, match="no chief"):
        strategies.serve_if_server()


def test_an_evaluator_has_no_part(monkeypatch):
    place(monkeypatch, "evaluator", **WHOLE)
    with pytest.raises(ValueError, match="The chief evaluates itself.*role='evaluator'"):
        strategies.serve_if_server()


def slurm(task):
    """Give the cluster of a job with three tasks, the last of them a parameter server."""
    environ = {"SLURM_PROCID": str(task), "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "localhost"}
    return cluster_module.ClusterConfig.from_environment(environ, parameter_servers=1)


def test_a_cluster_of_another_source_serves_too(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")  # and back to what it was in the end
    strategies.serve_if_server(slurm(0))
    assert cluster_module.ClusterConfig.from_environment() == slurm(0)  # as the chief finds it
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        server = dataclasses.replace(slurm(2), parameter_servers=[address])
        with pytest.raises(ValueError, match=f"ps 0 cannot serve at {address} .address already"):
            strategies.serve_if_server(server)
