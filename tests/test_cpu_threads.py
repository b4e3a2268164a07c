"""Threads for JAX's logical CPU devices."""

import os
import subprocess
import sys

import keras
import pytest

from kdpkit import _cpu_threads


@pytest.mark.parametrize(
    ("cores", "devices", "threads"),
    [
        (2, 2, "4"),
        (3, 2, "4"),
        (4, 2, None),
        (2, 8, "16"),
        (16, 8, None),
        (1, 1, "2"),
        (2, 1, None),
    ],
)
def test_where_cores_are_few_each_device_has_two_threads(monkeypatch, cores, devices, threads):
    monkeypatch.setenv("PJRT_NPROC", "")  # so that it is put back
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    _cpu_threads.reserve(devices)
    assert os.environ.get("PJRT_NPROC") == threads


def test_a_number_of_threads_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "3")
    _cpu_threads.reserve(1000)
    assert os.environ["PJRT_NPROC"] == "3"


# Python runs far ahead of two devices on two cores. With PJRT_NPROC=2, one thread for each device,
# it stopped for ever on every try.
RUNNING_AHEAD = """
import argparse, os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import keras, numpy as np
from kdpkit import experiment, sharding
strategy = experiment.strategy_from(argparse.Namespace(strategy="mirrored", replicas=2))
mesh = sharding.as_mesh(strategy)
layers = [keras.layers.Dense(128, activation="tanh") for _ in range(16)]
model = keras.Sequential([keras.Input((128,)), *layers])
optimizer = keras.optimizers.SGD()
state = sharding.TrainState.replicated(model, optimizer, mesh)
step = sharding.make_train_step(model, optimizer, keras.losses.MeanSquaredError())
x = np.ones((2048, 128), "float32")
batch = sharding.shard_batch((x, x), mesh)
for _ in range(200):
    state, logs = step(state, batch)
print("finite:", np.isfinite(float(logs["loss"])))
"""


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="once is enough")
def test_steps_on_jax_end_however_far_python_runs_ahead():
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    finished = subprocess.run(
        [sys.executable, "-c", RUNNING_AHEAD],
        env={**environment, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "finite: True" in finished.stdout, finished.stderr[-3000:]
