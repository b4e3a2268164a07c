"""Threads for JAX's logical CPU devices."""

import os

import pytest

from kdpkit._internal import machine
from tests.processes import run_code


@pytest.mark.parametrize(
    ("cores", "devices", "threads"), [(2, 2, "4"), (4, 2, None), (3, 8, "16"), (1, 1, "2")]
)
def test_where_cores_are_few_each_device_has_two_threads(monkeypatch, cores, devices, threads):
    monkeypatch.setenv("PJRT_NPROC", "")  # so that it is put back
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("XLA_FLAGS", os.getenv("XLA_FLAGS", ""))
    machine.split_cpu(devices, "jax")
    assert os.environ.get("PJRT_NPROC") == threads


# Python runs far ahead of two devices on two cores. With PJRT_NPROC=2, one thread for each device,
# it hung on every try.
RUNNING_AHEAD = """
import argparse, os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, numpy as np
from kdpkit import experiment
from kdpkit.sharding._batches import place_batch, replicated
from kdpkit.sharding._meshes import as_mesh
strategy = experiment.strategy_from(argparse.Namespace(strategy="mirrored", replicas=2))
mesh = as_mesh(strategy)

def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)

@jax.jit
def step(weights, x):
    gradients = jax.grad(loss)(weights, x)
    return [weight - 0.01 * gradient for weight, gradient in zip(weights, gradients)]

random = np.random.default_rng(0)
weights = [random.normal(0, 0.1, (128, 128)).astype("float32") for _ in range(16)]
weights = jax.device_put(weights, replicated(mesh))
x = place_batch(np.ones((2048, 128), "float32"), mesh)
for _ in range(200):
    weights = step(weights, x)
print("finite:", np.isfinite(weights[0]).all())
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.tensorflow  # once
def test_steps_on_jax_end_however_far_python_runs_ahead(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    finished = run_code(RUNNING_AHEAD, KERAS_BACKEND="jax", check=False)
    assert "finite: True" in finished.stdout, finished.stderr[-3000:]
